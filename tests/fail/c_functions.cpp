// expect: PLAIT_C_RELABEL is for specs between which no data moves or changes
// expect: a kernel has an output and one to four operands: a contraction two, a reduction one, rows_of a table and ids
// expect: the input and the output of a layer of a C program are sharded or invariant on each axis, so that a gradient has its array's spec
// expect: the bias array has another spec than the layer's bias, which is sharded as the output along its dims
// expect: a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first
// errors-at-most: 5
#include "plait/nn/layer.hpp"

#include "plait/c.hpp"

using namespace plait;

// The arrays of a C program, as PLAIT_C_ARRAY declares them.
template <int>
struct array {
  float* data;
  std::int64_t size;
};
using rows = array<0>;
using copies = array<1>;
using terms = array<2>;
using inner = array<3>;
using up_weight = array<4>;
using up_bias = array<5>;
using whole_bias = array<6>;
using row_sums = array<7>;
template <>
struct plait::c::array<rows> : array_of<float, spec<batch, hidden, invariant<tp>>> {
  static constexpr char text[] = "rows";
};
template <>
struct plait::c::array<copies> : array_of<float, spec<batch, hidden, replicate<tp>>> {};
template <>
struct plait::c::array<terms> : array_of<float, spec<batch, hidden, partial<tp>>> {
  static constexpr char text[] = "terms";
};
template <>
struct plait::c::array<inner> : array_of<float, spec<batch, shard<ffn, tp>>> {};
template <>
struct plait::c::array<up_weight> : array_of<float, spec<shard<ffn, tp>, hidden>> {};
template <>
struct plait::c::array<up_bias> : array_of<float, spec<shard<ffn, tp>>> {};
template <>
struct plait::c::array<whole_bias> : array_of<float, spec<ffn, invariant<tp>>> {};
template <>
struct plait::c::array<row_sums> : array_of<float, spec<hidden, invariant<tp>>> {};

#ifdef PLAIT_FAIL_FIX
using relabeled = rows;
using activated = rows;
using entering = rows;
using bias = up_bias;
void reduced(row_sums, rows) {}
#else
using relabeled = terms;
using activated = terms;
using entering = copies;
using bias = whole_bias;
void reduced(row_sums, rows, rows) {}
#endif
void my_activation(activated, activated) {}

copies relabel_rows(plait_context* c, relabeled in) { return c::relabel<copies>(c, "relabel_rows", in); }
static_assert(c::follows_rule(rule::reduction, reduced));
static_assert(c::follows_rule(rule::nonlinear, my_activation));
static_assert(c::layer<entering, inner, up_weight>::arrays_fit());
static_assert(c::layer<rows, inner, up_weight, bias>::arrays_fit());
