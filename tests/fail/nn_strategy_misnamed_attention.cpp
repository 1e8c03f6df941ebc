// expect: the strategy has a member `attn`, which means nothing: did you mean `attention`?
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// The ring would be dropped in silence.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
#ifdef PLAIT_FAIL_FIX
  using attention = ring<cp>;
#else
  using attn = ring<cp>;
#endif
};
template class plait::self_attention<float, my_strategy>;
