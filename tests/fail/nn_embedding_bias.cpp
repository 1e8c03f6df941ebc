// expect: an embedding has no bias: leave `bias` out of its policy
// expect: my_table
// errors-at-most: 1
#include "plait/nn/embedding.hpp"

using namespace plait;

// The bias would be dropped in silence.
struct my_table {
  using input = spec<shard<batch, dp>, shard<seq, cp>, invariant<tp>>;
  using weight = spec<shard<vocab, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
#ifndef PLAIT_FAIL_FIX
  static constexpr bool bias = true;
#endif
};
template class plait::embedding<float, my_table>;
