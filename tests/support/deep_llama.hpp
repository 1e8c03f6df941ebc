#pragma once

#include "support/llama_parity.hpp"

/// Small Llamas in double, with two or six layers.
namespace plait::test {

using small_llama = llama<double, megatron_sp, cpu>;

/// Six layers, and sequences of 8 tokens.
inline scenario deep() {
  scenario s{small_config(8, 4)};
  s.config.layers = 6;
  s.seq = 8;
  return s;
}

}  // namespace plait::test
