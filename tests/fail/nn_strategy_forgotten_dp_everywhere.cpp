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
  using heads = shard<plait::heads, tp>;
  using kv_heads = shard<plait::kv_heads, tp>;
  using ffn = shard<plait::ffn, tp>;
  using vocab = shard<plait::vocab, tp>;
  using attention = ring<cp>;
};
template class plait::llama<float, my_strategy>;
