// expect: the strategy has a member `store`, which means nothing: did you mean `stored`?
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// Weights would be stored as they are used.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using heads = shard<plait::heads, tp>;
  using kv_heads = shard<plait::kv_heads, tp>;
  using ffn = shard<plait::ffn, tp>;
  using vocab = shard<plait::vocab, tp>;
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
