// expect: the strategy has a member `attn`, which means nothing: did you mean `attention`?
// expect: my_strategy
// expect: the strategy has a member `ffn`, which means nothing: did you mean `feed_forward`?
// errors-at-most: 2
#include "plait/nn/attention.hpp"
#include "plait/nn/strategy.hpp"

using namespace plait;

// Without the error, the ring would be ignored.
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

// The base strategy has the member whose name is misspelled here.
struct derived_strategy : megatron_sp {
#ifndef PLAIT_FAIL_FIX
  using ffn = shard<plait::ffn, tp, tp_rep>;
#endif
};
template class plait::self_attention<float, derived_strategy>;
