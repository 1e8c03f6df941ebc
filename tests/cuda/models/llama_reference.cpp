#include "support/llama_parity.hpp"

namespace plait::test {

rank_outcome train_on_cpu(const scenario& s) { return train_one<float, megatron_sp>(s); }

}  // namespace plait::test
