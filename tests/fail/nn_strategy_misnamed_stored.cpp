// expect: the strategy has a member `store`, which means nothing: did you mean `stored`?
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// Weights would be stored as they are used.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
#ifdef PLAIT_FAIL_FIX
  using attention = ring<cp>;
  template <class Weight>
  using stored = Weight;
#else
  using attention = ring<cp>;
  template <class Weight>
  using store = Weight;
#endif
};
template class plait::self_attention<float, my_strategy>;
