// expect: the policy has a member `store`, which means nothing: did you mean `stored`?
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

// The weight would be stored as it is used.
struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
#ifdef PLAIT_FAIL_FIX
  using stored = spec<shard<ffn, tp>, shard<hidden, dp>>;
#else
  using store = spec<shard<ffn, tp>, shard<hidden, dp>>;
#endif
};
template class plait::linear<float, up_policy>;
