// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::residual>, plait::expected_dims<plait::batch, plait::seq, plait::hidden>, plait::given_dims<plait::seq, plait::batch, plait::hidden>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"

using namespace plait;

// Megatron's order: attention would take the sequence for samples.
struct my_strategy {
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
#ifdef PLAIT_FAIL_FIX
  using residual = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
#else
  using residual = spec<seq, shard<batch, dp>, hidden, invariant<tp>>;
#endif
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
};
template class plait::self_attention<float, my_strategy>;
