// expect: a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, partial<axis> or invariant<axis>
// expect: on_axis<plait::dp>
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

struct up_policy {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
#ifdef PLAIT_FAIL_FIX
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
#else
  using input = spec<batch, hidden, invariant<tp>>;
  using output = spec<batch, shard<ffn, tp>>;
#endif
  using weight = spec<shard<ffn, tp>, hidden>;
};
template class plait::linear<float, up_policy>;
