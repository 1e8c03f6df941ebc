// program: layout_oracles
#include "plait/layout/experts.hpp"
#include "support/oracle.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_oracle_experts {  // files of one program may have helpers of the same name

struct width : dim_tag<"width"> {};
struct inside : dim_tag<"inside"> {};
const dim_id t = dim_of<token>, h = dim_of<width>, f = dim_of<inside>;
constexpr expert_dims dims{dim_of<experts>, dim_of<expert_slot>, dim_of<expert_choice>};

/// The layout of the choice of tokens with layout `a`: indices are never terms of a sum.
layout choice_of(layout a) {
  a.dims.push_back({dims.chosen, {}});
  for (axis_id axis : axis_list(a.partial)) a.set(axis, state::replicated);
  return a;
}

/// Each rank keeps the rows of its own experts: the change from replicated to sharded, which sends nothing.
layout of_own_experts(layout rows, const layout& weight) {
  for (axis_id axis : weight.axes_of(dims.experts))
    if (rows.state_of(axis) == state::replicated) rows.append(dims.experts, axis);
  return rows;
}

/// y = sum over all experts of w[t] times the expert's output for x[t]. Every token chooses every expert, so the sum is
/// one over dense arrays.
operation mixture(std::string text, std::vector<dim_id> weight, std::vector<dim_id> out) {
  operation op{text, {{t, h}, weight, {t}}, out, {true, true, true}};
  set_local_formula(
      op, [](const auto& x) { return x[0] * x[1] * x[2]; },
      [](const auto& x, std::size_t i) { return x[(i + 1) % 3] * x[(i + 2) % 3]; });
  op.rule = [out](const std::vector<layout>& operands) {
    const layout& weights = operands[2];
    const derived_layout rows = dispatch_rows(operands[0], choice_of(weights), dims);
    dim_list made{dims.experts, dims.slot};
    for (std::size_t i = 1; i < out.size(); ++i) made.push_back(out[i]);
    const derived_layout computed = contract(of_own_experts(rows.result, operands[1]), operands[1], made);
    derived_layout y = combine_rows(computed.result, weights, dims);
    y.verdict.worsen(rows.verdict);
    y.verdict.worsen(computed.verdict);
    return y;
  };
  return op;
}

TEST_CASE("experts that scale their rows") {
  check_rule(mixture("[t h][e h][t] -> [t h]", {dims.experts, h}, {t, h}), {t, h, dims.experts});
}
TEST_CASE("experts that multiply their rows by a matrix") {
  check_rule(mixture("[t h][e f h][t] -> [t f]", {dims.experts, f, h}, {t, f}), {t, h, f, dims.experts}, false);
}

}  // namespace layout_oracle_experts
