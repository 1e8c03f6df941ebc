// expect: a forgotten reduction: the value is still partial over an axis on which it has to be complete
// expect: on_axis<plait::dp>
// errors-at-most: 1
#include "plait/parallel/optim/adamw.hpp"
#include "plait/tensor/redistribution.hpp"

using namespace plait;

// Each data-parallel rank has seen its part of the batch.
using stored = spec<hidden, invariant<dp, tp>>;
using gradient = dual_t<spec<hidden, replicate<dp, tp>>>;
#ifdef PLAIT_FAIL_FIX
using reduced = spec<hidden, invariant<dp, tp>>;
#else
using reduced = spec<hidden, partial<dp>, invariant<tp>>;
#endif
void optimizer_step(context<cpu>& ctx, adamw<float>& optimizer, tensor<float, stored>& weight, tensor<float, gradient>& partial_gradient) {
  const auto sum = redistribute<reduced>(ctx, partial_gradient);
  optimizer.update(ctx, "weight", weight, sum);
}
