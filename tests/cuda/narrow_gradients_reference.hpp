#pragma once

#include "support/llama_parity.hpp"

namespace plait::test {

/// The scenario on one rank of the cpu, with gradients in bf16 and float masters, under megatron_sp.
rank_outcome train_narrow_on_cpu(const scenario& s);

}  // namespace plait::test
