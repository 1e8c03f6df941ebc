// expect: attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel policy
// expect: on_axis<plait::cp>
// expect: on_dim<plait::seq>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// Over cp each rank would attend to its own part of the sequence only.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
#ifdef PLAIT_FAIL_FIX
  using attention = ring<cp>;
#endif
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
};
template class plait::self_attention<float, my_strategy>;
