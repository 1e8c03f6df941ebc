// expect: the strategy has a member `attn`, which means nothing: did you mean `attention`?
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// The ring would be dropped in silence.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using heads = shard<plait::heads, tp>;
  using kv_heads = shard<plait::kv_heads, tp>;
  using ffn = shard<plait::ffn, tp>;
  using vocab = shard<plait::vocab, tp>;
#ifdef PLAIT_FAIL_FIX
  using attention = ring<cp>;
#else
  using attn = ring<cp>;
#endif
};
template class plait::self_attention<float, my_strategy>;
