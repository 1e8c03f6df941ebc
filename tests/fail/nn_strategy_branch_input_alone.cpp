// expect: a strategy names `branch_input` and `branch_output`, both or none: one of them alone means nothing
// errors-at-most: 1
#include "plait/nn/mlp.hpp"
#include "plait/nn/strategy.hpp"

using namespace plait;

// Branches that take the whole sequence: what they give would have lain as the residual in silence.
struct my_strategy : megatron_sp {
  using branch_input = spec<shard<batch, dp>, shard<seq, cp>, hidden, invariant<tp, tp_rep>>;
#ifdef PLAIT_FAIL_FIX
  using branch_output = residual;
#endif
};
template class plait::swiglu_mlp<float, my_strategy>;
