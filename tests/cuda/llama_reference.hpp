#pragma once

#include "support/llama_parity.hpp"

namespace plait::test {

/// The scenario on one rank of the cpu, under megatron_sp.
rank_outcome train_on_cpu(const scenario& s);

}  // namespace plait::test
