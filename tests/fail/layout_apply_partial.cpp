// expect: a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first
// expect: a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending sum first, then add
// expect: the output of a kernel has another spec than its rule derives from the operands: `states` shows the derived state, then the output's
// expect: a nonlinear reduction over a dim that is sharded: each rank sees only its part. Gather the dim first
// expect: states<plait::state::partial, plait::state::invariant>
// expect: expected_dims<plait::seq, plait::hidden>, plait::given_dims<plait::seq, plait::ffn>
// expect: a kernel takes a pointer to each output and a pointer to const for each operand, in their order, and then local_sizes, a number of elements, or nothing
// expect: a kernel has one to four operands in addition to its outputs: a contraction two, a reduction one, rows_of a table and ids
// expect: the spec of this part has no such dim
// errors-at-most: 10
#include "if_fixed.hpp"
#include "plait/layout/apply.hpp"

using namespace plait;

// A row-parallel product, the bias that is added to it, and its sum.
using product = spec<seq, hidden, partial<tp>>;
using whole = spec<seq, hidden, replicate<tp>>;
using settled = spec<seq, hidden, invariant<tp>>;
using rows = spec<shard<seq, tp>, hidden>;

void one(float*, const float*, std::int64_t) {}
void two(float*, const float*, const float*, std::int64_t) {}

void kernel(float*, if_fixed<const float, float>*) {}

using in_kernel = if_fixed<whole, product>;
void activation(const part<float, in_kernel>& y, const part<const float, in_kernel>& x) {
  apply(rule::nonlinear, one, y, x);
}
void bias(const part<float, in_kernel>& y, const part<const float, in_kernel>& x,
          const part<const float, spec<hidden, replicate<tp>>>& b) {
  apply(rule::sum, two, y, x, b);
}
// A forgotten all-reduce: the program declares that the sum is complete.
void forgotten(const part<float, if_fixed<product, settled>>& y, const part<const float, product>& x) {
  apply(rule::sum, one, y, x);
}
// The gradient of a bias is a term of a sum over the ranks that share the rows.
using bias_gradient = if_fixed<spec<hidden, partial<tp>>, spec<hidden, invariant<tp>>>;
void gradient(const part<float, bias_gradient>& db, const part<const float, rows>& dy) {
  apply(rule::reduction, one, db, dy);
}
using soft = if_fixed<spec<seq, shard<hidden, tp>>, rows>;
void softmax_over_tokens(const part<float, soft>& y, const part<const float, soft>& x) {
  apply(rule::nonlinear.over<seq>(), one, y, x);
}

// Arrays with other dims, and a kernel that may write to its operand.
void dims(const part<float, if_fixed<rows, spec<seq, shard<ffn, tp>>>>& y, const part<const float, rows>& x) {
  apply(rule::nonlinear, one, y, x);
}
void writes(const part<float, rows>& y, const part<const float, rows>& x) { apply(rule::nonlinear, kernel, y, x); }

// A reduction of two operands, and the size of a dim that an array does not have.
void counted(const part<float, spec<hidden, partial<tp>>>& db, const part<const float, rows>& x) {
#ifdef PLAIT_FAIL_FIX
  apply(rule::reduction, one, db, x);
#else
  apply(rule::reduction, two, db, x, x);
#endif
}
std::int64_t size_of(const part<float, rows>& x) { return x.extent<if_fixed<hidden, ffn>>(); }
