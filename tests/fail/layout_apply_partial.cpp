// expect: a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first
// expect: a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending sum first, then add
// expect: the output of a kernel does not lie as its rule derives it from the operands: `states` shows the derived one, then the output's
// expect: a nonlinear reduction over a dim that is sharded: each rank sees only its part. Gather the dim first
// expect: states<plait::state::partial, plait::state::invariant>
// errors-at-most: 6
#include "plait/layout/apply.hpp"

using namespace plait;

// A row-parallel product, the bias that is added to it, and its sum.
using product = spec<seq, hidden, partial<tp>>;
using whole = spec<seq, hidden, replicate<tp>>;
using settled = spec<seq, hidden, invariant<tp>>;
using rows = spec<shard<seq, tp>, hidden>;

void one(float*, const float*, std::int64_t) {}
void two(float*, const float*, const float*, std::int64_t) {}

#ifdef PLAIT_FAIL_FIX
using in_kernel = whole;
using sum_of_kernel = whole;
using soft = spec<seq, shard<hidden, tp>>;
#else
using in_kernel = product;
using sum_of_kernel = product;
using soft = rows;
#endif

void activation(const part<float, in_kernel>& y, const part<const float, in_kernel>& x) {
  apply(rule::nonlinear, one, y, x);
}
void bias(const part<float, sum_of_kernel>& y, const part<const float, sum_of_kernel>& x,
          const part<const float, spec<hidden, replicate<tp>>>& b) {
  apply(rule::sum, two, y, x, b);
}
// A forgotten all-reduce: the sum is said to be there.
#ifdef PLAIT_FAIL_FIX
void forgotten(const part<float, product>& y, const part<const float, product>& x) { apply(rule::sum, one, y, x); }
#else
void forgotten(const part<float, settled>& y, const part<const float, product>& x) { apply(rule::sum, one, y, x); }
#endif
// The gradient of a bias is a term of a sum over the ranks that have the rows.
#ifdef PLAIT_FAIL_FIX
using bias_gradient = spec<hidden, partial<tp>>;
#else
using bias_gradient = spec<hidden, invariant<tp>>;
#endif
void gradient(const part<float, bias_gradient>& db, const part<const float, rows>& dy) {
  apply(rule::reduction, one, db, dy);
}
void softmax_over_tokens(const part<float, soft>& y, const part<const float, soft>& x) {
  apply(rule::nonlinear.over<seq>(), one, y, x);
}
