// expect: a strategy names `feed_forward`: using feed_forward = shard<ffn, tp>, or the dim
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/mlp.hpp"

using namespace plait;

// A strategy that says nothing of the MLP.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
#ifdef PLAIT_FAIL_FIX
  using feed_forward = shard<ffn, tp>;
#endif
  using vocabulary = shard<vocab, tp>;
  using attention = ring<cp>;
};
template class plait::swiglu_mlp<float, my_strategy>;
