// expect: a policy's `overlap` is a type: using overlap = pl::overlap<4>;
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

struct up_policy {
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
#ifdef PLAIT_FAIL_FIX
  using overlap = plait::overlap<4>;
#else
  static constexpr int overlap = 4;
#endif
};
template class plait::linear<float, up_policy>;
