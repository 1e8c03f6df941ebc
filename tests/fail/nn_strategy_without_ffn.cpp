// expect: a strategy names `ffn`: using ffn = shard<plait::ffn, tp>, or the dim
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/mlp.hpp"

using namespace plait;

// A strategy that says nothing of the MLP.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using heads = shard<plait::heads, tp>;
  using kv_heads = shard<plait::kv_heads, tp>;
#ifdef PLAIT_FAIL_FIX
  using ffn = shard<plait::ffn, tp>;
#endif
  using vocab = shard<plait::vocab, tp>;
  using attention = ring<cp>;
};
template class plait::swiglu_mlp<float, my_strategy>;
