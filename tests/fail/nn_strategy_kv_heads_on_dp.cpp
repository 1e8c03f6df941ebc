// expect: the axes of kv_heads must be the leading axes of heads
// expect: on_axis<plait::dp>, plait::on_dim<plait::kv_heads>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// dp shards the batch.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using query_heads = shard<heads, tp>;
#ifdef PLAIT_FAIL_FIX
  using key_heads = shard<kv_heads, tp>;
#else
  using key_heads = shard<kv_heads, dp>;
#endif
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
  using attention = ring<cp>;
};
template class plait::self_attention<float, my_strategy>;
