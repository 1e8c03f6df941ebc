// expect: a forgotten reduction: the value is still partial over an axis on which it has to be complete
// expect: on_axis<plait::dp>
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

// A weight that is stored replicated would be handed to the optimizer with a gradient that is still partial.
struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
#ifdef PLAIT_FAIL_FIX
  using weight = spec<shard<ffn, tp>, hidden>;
#else
  using weight = spec<shard<ffn, tp>, hidden, replicate<dp>>;
#endif
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
};
template class plait::linear<float, up_policy>;
