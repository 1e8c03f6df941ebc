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
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
};
template class plait::swiglu_mlp<float, my_strategy>;
