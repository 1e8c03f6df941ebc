// program: layout_oracles
#include "support/oracle.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_oracle_contract {  // files of one program may have helpers of the same name

const dim_id m = dim_of<row>, k = dim_of<inner>, n = dim_of<column>, g = dim_of<group>;

operation contraction(std::string text, std::vector<dim_id> a, std::vector<dim_id> b, std::vector<dim_id> out) {
  operation op{text, {a, b}, out, {true, true}};
  set_local_formula(
      op, [](const auto& x) { return x[0] * x[1]; }, [](const auto& x, std::size_t i) { return x[1 - i]; });
  op.rule = [out](const std::vector<layout>& operands) {
    dim_list list;
    for (dim_id dim : out) list.push_back(dim);
    return contract(operands[0], operands[1], list);
  };
  return op;
}

TEST_CASE("matrix product, the transposed weight of a linear") {
  check_rule(contraction("[m k][n k] -> [m n]", {m, k}, {n, k}, {m, n}), {m, n, k});
}
TEST_CASE("matrix product with a transposed result") {
  check_rule(contraction("[k m][k n] -> [n m]", {k, m}, {k, n}, {n, m}), {m, n, k});
}
TEST_CASE("vectors: inner, outer and elementwise product") {
  check_rule(contraction("[k][k] -> []", {k}, {k}, {}), {k});
  check_rule(contraction("[m][n] -> [m n]", {m}, {n}, {m, n}), {m, n});
  check_rule(contraction("[m][m] -> [m]", {m}, {m}, {m}), {m});
}
TEST_CASE("products with dims of one operand only") {
  check_rule(contraction("[m k][m] -> [m]", {m, k}, {m}, {m}), {m, k});
  check_rule(contraction("[m k][m] -> [m k]", {m, k}, {m}, {m, k}), {m, k});
  check_rule(contraction("[m k][m k] -> [k]", {m, k}, {m, k}, {k}), {m, k});
  check_rule(contraction("[m][] -> [m]", {m}, {}, {m}), {m});
}
TEST_CASE("batched matrix product") {
  check_rule(contraction("[g m k][g k n] -> [g m n]", {g, m, k}, {g, k, n}, {g, m, n}), {g, m, n, k}, false);
  check_rule(contraction("[g m k][g k] -> [g m]", {g, m, k}, {g, k}, {g, m}), {g, m, k});
}

}  // namespace layout_oracle_contract
