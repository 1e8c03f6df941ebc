// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::kv_heads>, plait::expected_dims<plait::kv_heads>, plait::given_dims<plait::heads>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// The dim of the queries where that of the keys is meant.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<tp>>;
  using residual = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
  using query_heads = shard<heads, tp>;
#ifdef PLAIT_FAIL_FIX
  using key_heads = shard<kv_heads, tp>;
#else
  using key_heads = shard<heads, tp>;
#endif
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
  using attention = ring<cp>;
};
template class plait::self_attention<float, my_strategy>;
