// expect: a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, partial<axis> or invariant<axis>
// expect: on_axis<plait::dp>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/mlp.hpp"

using namespace plait;

struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
#ifdef PLAIT_FAIL_FIX
  using residual = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
#else
  using residual = spec<batch, shard<seq, tp>, hidden>;
#endif
  using heads = shard<plait::heads, tp>;
  using kv_heads = shard<plait::kv_heads, tp>;
  using ffn = shard<plait::ffn, tp>;
  using vocab = shard<plait::vocab, tp>;
};
template class plait::swiglu_mlp<float, my_strategy>;
