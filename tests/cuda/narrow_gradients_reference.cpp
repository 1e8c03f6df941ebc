#include "cuda/narrow_gradients_reference.hpp"

namespace plait::test {

rank_outcome train_narrow_on_cpu(const scenario& s) { return train_one<bf16_gradients_float_masters, megatron_sp>(s); }

}  // namespace plait::test
