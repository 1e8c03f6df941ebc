// program: layout_oracles
#include "support/oracle.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_oracle_pointwise {  // files of one program may have helpers of the same name

const dim_id m = dim_of<row>, n = dim_of<column>;

/// a + 2 b + 3 c; a b c; or (a + 2 b + 3 c)^2, which is not linear in any of them.
operation elementwise(combine how, std::vector<std::vector<dim_id>> operands) {
  std::string text = how == combine::sum ? "sum" : how == combine::product ? "product" : "nonlinear";
  for (const auto& dims : operands) {
    text += " [";
    for (dim_id dim : dims) text += dim.text()[0];
    text += "]";
  }
  operation op{text, operands, operands[0], std::vector<bool>(operands.size(), true)};
  const auto sum = [](const std::vector<element>& x) {
    element total = 0;
    for (std::size_t i = 0; i < x.size(); ++i) total += (i + 1) * x[i];
    return total;
  };
  const auto product = [](const std::vector<element>& x, std::size_t without) {
    element total = 1;
    for (std::size_t i = 0; i < x.size(); ++i) total *= i == without ? 1 : x[i];
    return total;
  };
  set_local_formula(
      op,
      [=](const auto& x) {
        return how == combine::sum ? sum(x) : how == combine::product ? product(x, x.size()) : sum(x) * sum(x);
      },
      [=](const auto& x, std::size_t i) {
        return how == combine::sum ? i + 1 : how == combine::product ? product(x, i) : 2 * (i + 1) * sum(x);
      });
  op.rule = [how](const std::vector<layout>& a) {
    return a.size() == 1   ? pointwise(how, {&a[0]})
           : a.size() == 2 ? pointwise(how, {&a[0], &a[1]})
                           : pointwise(how, {&a[0], &a[1], &a[2]});
  };
  return op;
}

void check_all(std::vector<std::vector<dim_id>> operands, bool two_axes = true) {
  for (combine how : {combine::sum, combine::product, combine::nonlinear})
    check_rule(elementwise(how, operands), {m, n}, two_axes);
}

TEST_CASE("one operand") { check_all({{m, n}}); }
TEST_CASE("two operands of equal dims") { check_all({{m, n}, {m, n}}); }
TEST_CASE("two operands, dims in another order") { check_all({{m, n}, {n, m}}); }
TEST_CASE("two operands, one broadcast") {
  check_all({{m, n}, {n}});
  check_all({{m, n}, {m}});
  check_all({{m, n}, {}});
}
TEST_CASE("three operands") {
  check_all({{m}, {m}, {m}});
  check_all({{m, n}, {m, n}, {n}}, false);
}
TEST_CASE("three operands, two broadcast, on two axes") { check_all({{m, n}, {m}, {n}}); }
TEST_CASE("an operand that occurs twice is not an exception") {
  layout pending;
  pending.dims.push_back({m, {}});
  pending.set(axis_of<mesh_a>, state::partial);
  CHECK(pointwise(combine::product, {&pending, &pending}).verdict.code == layout_error::partial_times_partial);
  CHECK(pointwise(combine::sum, {&pending, &pending}).verdict.ok());
  CHECK(contract(pending, pending, {}).verdict.code == layout_error::partial_times_partial);
  CHECK(attend(pending, pending, pending, {m, m, m}).verdict.code == layout_error::partial_nonlinear);
}

}  // namespace layout_oracle_pointwise
