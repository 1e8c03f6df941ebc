// expect: attention needs the sequence sharded over exactly the axes of its context-parallel policy, in its order
// expect: on_axis<plait::cp>
// expect: on_dim<plait::seq>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// A ring over cp whose ranks have the same tokens, because cp shards the batch.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
#ifdef PLAIT_FAIL_FIX
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
#else
  using residual = spec<shard<batch, dp, cp>, shard<seq, tp>, hidden>;
#endif
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
  using attention = ring<cp>;
};
template class plait::self_attention<float, my_strategy>;
