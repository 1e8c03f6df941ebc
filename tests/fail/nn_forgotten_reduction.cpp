// errors-at-most: 1
#include "plait/parallel/optim/adamw.hpp"
#include "plait/tensor/redistribution.hpp"

using namespace plait;

template <class Gradient, class Reduced, class Stored>
void optimizer_step(context<cpu>& ctx, adamw<float>& optimizer, tensor<float, Stored>& weight, const tensor<float, Gradient>& partial_gradient) {
  const auto sum = redistribute<Reduced>(ctx, partial_gradient);
  optimizer.update(ctx, "weight", weight, sum);
}

// case: cp
// expect: a forgotten reduction: the value is still partial over an axis on which it has to be complete
// expect: on_axis<plait::cp>
// Context parallelism without data parallelism also needs a sum over cp.
using stored = spec<hidden, invariant<cp, dp>>;
using gradient = dual_t<spec<hidden, replicate<dp, cp>>>;
#ifdef PLAIT_FAIL_FIX
using reduced = spec<hidden, invariant<cp, dp>>;
#else
using reduced = spec<hidden, partial<cp>, invariant<dp>>;
#endif
const auto step = optimizer_step<gradient, reduced, stored>;

// case: dp
// expect: a forgotten reduction: the value is still partial over an axis on which it has to be complete
// expect: on_axis<plait::dp>
// Each data-parallel rank has the gradient of its part of the batch.
using stored = spec<hidden, invariant<dp, tp>>;
using gradient = dual_t<spec<hidden, replicate<dp, tp>>>;
#ifdef PLAIT_FAIL_FIX
using reduced = spec<hidden, invariant<dp, tp>>;
#else
using reduced = spec<hidden, partial<dp>, invariant<tp>>;
#endif
const auto step = optimizer_step<gradient, reduced, stored>;

// case: tp
// expect: a forgotten reduction: the value is still partial over an axis on which it has to be complete
// expect: on_axis<plait::tp>
// The weight of a norm under sequence parallelism: each rank has the gradient of its part of the sequence.
using stored = spec<hidden, invariant<dp, tp>>;
using gradient = dual_t<spec<hidden, replicate<dp, tp>>>;
#ifdef PLAIT_FAIL_FIX
using reduced = spec<hidden, invariant<dp, tp>>;
#else
using reduced = spec<hidden, partial<tp>, invariant<dp>>;
#endif
const auto step = optimizer_step<gradient, reduced, stored>;
