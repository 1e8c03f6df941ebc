// expect: an embedding has no product to overlap with: leave `overlap` out of its policy
// expect: my_table
// errors-at-most: 1
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear/policy.hpp"

using namespace plait;

// The wish would be dropped in silence.
struct my_table {
  using input = spec<shard<batch, dp>, shard<seq, cp>, invariant<tp>>;
  using weight = spec<shard<vocab, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
#ifndef PLAIT_FAIL_FIX
  using overlap = plait::overlap<4>;
#endif
};
template class plait::embedding<float, my_table>;
