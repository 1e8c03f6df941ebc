// expect: a shared expert multiplies whole rows by its gate: the residual must not shard its last dim
#include "plait/nn/moe/shared_expert.hpp"

using namespace plait;

struct rows : axis_tag<"rows"> {};

// Two-dimensional tensor parallelism: each rank has a part of each row.
struct two_dims {
  using mesh = plait::mesh<axis<dp>, axis<rows>, axis<tp>>;
#ifdef PLAIT_FAIL_FIX
  using residual = spec<shard<batch, dp>, seq, hidden, invariant<tp, rows>>;
#else
  using residual = spec<shard<batch, dp>, seq, shard<hidden, rows>, invariant<tp>>;
#endif
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
};
template class plait::shared_expert<float, two_dims>;
