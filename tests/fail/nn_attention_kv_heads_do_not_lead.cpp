// expect: the axes of kv_heads must be the leading axes of heads: shard<heads, a, b> goes with shard<kv_heads, a, b> or shard<kv_heads, a>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

struct outer : axis_tag<"outer"> {};
struct inner : axis_tag<"inner"> {};

struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<outer>, axis<inner>>;
  using residual = spec<shard<batch, dp>, shard<seq, outer, inner>, hidden>;
  using query_heads = shard<heads, outer, inner>;
#ifdef PLAIT_FAIL_FIX
  using key_heads = shard<kv_heads, outer>;
#else
  using key_heads = shard<kv_heads, inner>;
#endif
  using feed_forward = shard<ffn, outer, inner>;
  using vocabulary = shard<vocab, outer, inner>;
};
template class plait::self_attention<float, my_strategy>;
