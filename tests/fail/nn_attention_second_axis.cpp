// expect: attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel policy
// expect: on_axis<inner>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/strategy.hpp"
#include "plait/nn/attention.hpp"

using namespace plait;

struct inner : axis_tag<"inner"> {};

// The sequence is sharded over two axes, and the policy knows one of them.
struct my_strategy : megatron_sp {
  using mesh = plait::mesh<axis<dp>, axis<cp>, axis<inner>, axis<tp>, axis<tp_rep>>;
  using residual = spec<shard<batch, dp>, shard<zseq, cp, inner, tp, tp_rep>, hidden>;
#ifdef PLAIT_FAIL_FIX
  using attention = ulysses<inner, ring<cp>>;
#else
  using attention = ring<cp>;
#endif
};
template class plait::self_attention<float, my_strategy>;
