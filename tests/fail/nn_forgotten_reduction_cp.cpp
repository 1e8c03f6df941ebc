// expect: a forgotten reduction: the value is still partial over an axis on which it has to be complete
// expect: on_axis<plait::cp>
// errors-at-most: 1
#include "plait/parallel/optim/adamw.hpp"
#include "plait/tensor/redistribution.hpp"

using namespace plait;

// Context parallelism without data parallelism is still a sum over cp.
using stored = spec<hidden, invariant<cp, dp>>;
using gradient = dual_t<spec<hidden, replicate<dp, cp>>>;
#ifdef PLAIT_FAIL_FIX
using reduced = spec<hidden, invariant<cp, dp>>;
#else
using reduced = spec<hidden, partial<cp>, invariant<dp>>;
#endif
void optimizer_step(context<cpu>& ctx, adamw<float>& optimizer, tensor<float, stored>& weight, tensor<float, gradient>& partial_gradient) {
  const auto sum = redistribute<reduced>(ctx, partial_gradient);
  optimizer.update(ctx, "weight", weight, sum);
}
