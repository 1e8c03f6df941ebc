// expect: a policy's `bias` is a constant: static constexpr bool bias = true;
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

// A member of each object says nothing of the type.
struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
#ifdef PLAIT_FAIL_FIX
  static constexpr bool bias = true;
#else
  bool bias = true;
#endif
};
template class plait::linear<float, up_policy>;
