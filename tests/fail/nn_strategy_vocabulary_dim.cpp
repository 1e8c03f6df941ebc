// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::vocabulary>, plait::expected_dims<plait::vocab>, plait::given_dims<plait::ffn>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// The embedding would have as many rows as the feed-forward layer is wide.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
#ifdef PLAIT_FAIL_FIX
  using vocabulary = shard<vocab, tp>;
#else
  using vocabulary = shard<ffn, tp>;
#endif
};
template class plait::self_attention<float, my_strategy>;
