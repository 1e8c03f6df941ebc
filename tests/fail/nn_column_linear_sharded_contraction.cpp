// expect: the dim that a linear contracts is sharded in its input but not in its weight: gather the input first, or shard the weight's contracted dim over the same axes (row-parallel)
// expect: on_axis<plait::tp>
// expect: on_dim<plait::hidden>
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

struct up_policy {
#ifdef PLAIT_FAIL_FIX
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
#else
  using input = spec<shard<batch, dp>, shard<hidden, tp>>;
#endif
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
};
template class plait::linear<float, up_policy>;
