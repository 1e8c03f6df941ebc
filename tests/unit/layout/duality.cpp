// program: layout_plans
#include <doctest/doctest.h>

#include "plait/layout/check.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/rules.hpp"
#include "support/placed_value.hpp"

using namespace plait;
using namespace plait::test;

namespace layout_duality {  // files of one program may have helpers of the same name

const dim_id m = dim_of<row>, k = dim_of<inner>, n = dim_of<column>;

TEST_CASE("the dual of the dual is the value") {
  for (const layout& a : all_layouts({m, n}, make_mesh({2, 2, 2}))) {
    CHECK(dual(dual(a)) == a);
    for (axis_id axis : a.mentioned()) CHECK(dual(a).state_of(axis) == dual(a.state_of(axis)));
  }
}

TEST_CASE("if a product is accepted, both products of its backward are too, and give the duals of its operands") {
  int accepted = 0;
  for (const layout& x : all_layouts({m, k}, make_mesh({2, 3})))
    for (const layout& w : all_layouts({n, k}, make_mesh({2, 3}))) {
      const derived_layout y = contract(x, w, dim_list{m, n});
      if (!y.verdict.ok()) continue;
      ++accepted;
      const std::string text = describe(x) + " " + describe(w) + " -> " + describe(y.result);
      CAPTURE(text);
      const derived_layout dx = contract(dual(y.result), w, dim_list{m, k}),
                           dw = contract(dual(y.result), x, dim_list{n, k});
      CHECK(dx.verdict.ok());
      CHECK(dw.verdict.ok());
      CHECK(equivalent(dx.result, dual(x)));
      CHECK(equivalent(dw.result, dual(w)));
    }
  CHECK(accepted > 20);
}

TEST_CASE("planning between layouts that do not divide ends, with a verdict or a plan") {
  dim_sizes odd;
  odd.set(m, 3), odd.set(n, 5);
  const std::vector<layout> all = all_layouts({m, n}, make_mesh({2, 2}));
  for (const layout& a : all)
    for (const layout& b : all) {
      const plan p = make_plan(a, b, make_mesh({2, 2}), odd);
      CHECK((!p.verdict.ok() || p.steps.empty() || p.steps.back().after == b));
      CHECK(
          make_plan(a, b, make_mesh({dynamic, dynamic}), odd).verdict.ok());  // no extent that a size could contradict
    }
}

}  // namespace layout_duality
