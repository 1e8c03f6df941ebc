// expect: a boundary spec must mention every axis of its mesh
// expect: on_axis<plait::dp>
// expect: my_strategy
// errors-at-most: 1
#include "plait/models/llama.hpp"

using namespace plait;

// Every layer of a model derives from the residual: one error all the same.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
#ifdef PLAIT_FAIL_FIX
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
#else
  using residual = spec<batch, shard<seq, cp, tp>, hidden>;
#endif
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
  using attention = ring<cp>;
};
template class plait::llama<float, my_strategy>;
