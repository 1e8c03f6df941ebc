// expect: the output of a layer does not lie as the next one takes it: let their policies agree, or put a redistribution between them
// errors-at-most: 1
#include "plait/nn/combinators.hpp"

using namespace plait;

struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
};
struct down_policy {
#ifdef PLAIT_FAIL_FIX
  using input = spec<shard<batch, dp>, shard<ffn, tp>>;
#else
  using input = spec<shard<batch, dp>, ffn, replicate<tp>>;
#endif
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = spec<shard<batch, dp>, hidden, invariant<tp>>;
};
using mlp = sequential<linear<float, up_policy>, linear<float, down_policy>>;
using end = mlp::output;
