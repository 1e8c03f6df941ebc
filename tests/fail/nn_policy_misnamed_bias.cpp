// expect: the policy has a member `has_bias`, which means nothing: did you mean `bias`?
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

// The bias would be dropped in silence.
struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
#ifdef PLAIT_FAIL_FIX
  static constexpr bool bias = true;
#else
  static constexpr bool has_bias = true;
#endif
};
template class plait::linear<float, up_policy>;
