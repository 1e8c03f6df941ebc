// expect: the output of a layer does not lie as the next one takes it: let their policies agree, or put a redistribution between them
// expect: on_axis<plait::tp>, plait::on_dim<plait::ffn>, plait::states<plait::state::varying, plait::state::replicated>
// expect: output_of_layer<0, plait::linear<float, up_policy
// expect: input_of_layer<1, plait::linear<float, down_policy
// errors-at-most: 1
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"

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
