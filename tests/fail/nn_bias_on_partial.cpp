// expect: a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending sum first, then add
// expect: on_axis<plait::tp>
// expect: down_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

struct down_policy {
  using input = spec<shard<batch, dp>, shard<ffn, tp>>;
  using weight = spec<hidden, shard<ffn, tp>>;
#ifdef PLAIT_FAIL_FIX
  using output = spec<shard<batch, dp>, hidden, invariant<tp>>;
#else
  using output = spec<shard<batch, dp>, hidden, partial<tp>>;
#endif
  static constexpr bool bias = true;
};
template class plait::linear<float, down_policy>;
