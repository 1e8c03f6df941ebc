// program: layout_plans
#include <doctest/doctest.h>

#include "plait/layout/check.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/spec.hpp"

using namespace plait;

namespace layout_plan_transitions {  // files of one program may have helpers of the same name

struct row : dim_tag<"row"> {};
struct column : dim_tag<"column"> {};

using I = spec<row, column, invariant<tp>>;
using R = spec<row, column, replicate<tp>>;
using P = spec<row, column, partial<tp>>;
using V = spec<shard<row, tp>, column>;
using W = spec<row, shard<column, tp>>;

template <class From, class To>
void goes_by(transition_kind forward, transition_kind backward) {
  const plan p = make_plan(layout_v<From>, layout_v<To>);
  CAPTURE(describe(p));
  REQUIRE(p.verdict.ok());
  REQUIRE(p.steps.size() == 1);
  CHECK(p.steps[0].kind == forward);
  CHECK(p.steps[0].after == layout_v<To>);
  const plan back = mirror(p);
  CAPTURE(describe(back));
  REQUIRE(back.steps.size() == 1);
  CHECK(back.steps[0].kind == backward);
  CHECK(back.steps[0].after == dual(layout_v<From>));
}
template <class Spec>
void stays() {
  CHECK(make_plan(layout_v<Spec>, layout_v<Spec>).steps.empty());
  CHECK(mirror(make_plan(layout_v<Spec>, layout_v<Spec>)).steps.empty());
}

TEST_CASE("the sixteen transitions of one axis") {
  stays<I>();
  stays<R>();
  stays<P>();
  stays<V>();
  goes_by<I, R>(transition_kind::relabel, transition_kind::all_reduce);
  goes_by<P, I>(transition_kind::all_reduce, transition_kind::relabel);
  goes_by<P, R>(transition_kind::all_reduce, transition_kind::all_reduce);
  goes_by<V, R>(transition_kind::all_gather, transition_kind::reduce_scatter);
  goes_by<V, I>(transition_kind::all_gather, transition_kind::slice);
  goes_by<I, V>(transition_kind::slice, transition_kind::all_gather);
  goes_by<P, V>(transition_kind::reduce_scatter, transition_kind::all_gather);
  goes_by<R, V>(transition_kind::slice, transition_kind::pad);
  goes_by<V, P>(transition_kind::pad, transition_kind::slice);
  goes_by<R, P>(transition_kind::keep_one, transition_kind::keep_one);
  goes_by<R, I>(transition_kind::relabel, transition_kind::keep_one);
  goes_by<I, P>(transition_kind::keep_one, transition_kind::relabel);
  goes_by<V, W>(transition_kind::all_to_all, transition_kind::all_to_all);
}

TEST_CASE("axes with the same transition share one collective") {
  const plan weight = make_plan(layout_v<spec<row, partial<dp, cp, tp>>>, layout_v<spec<row, invariant<dp, cp, tp>>>);
  REQUIRE(weight.steps.size() == 1);
  CHECK(weight.steps[0].axes.size() == 3);
  const plan gather = make_plan(layout_v<spec<shard<row, cp, tp>>>, layout_v<spec<row, replicate<cp, tp>>>);
  REQUIRE(gather.steps.size() == 1);
  CHECK(describe(gather.steps[0]) == "all_gather of row over cp, tp (varying -> replicated)");
}

TEST_CASE("other dims, or the same dims in another order, are not a redistribution") {
  CHECK(make_plan(layout_v<V>, layout_v<spec<row>>).verdict.code == layout_error::dims_differ);
  CHECK(make_plan(layout_v<V>, layout_v<spec<column, shard<row, tp>>>).verdict.code == layout_error::dims_differ);
}

TEST_CASE("a plan names the axes it communicates over") {
  const plan p = make_plan(layout_v<spec<shard<row, tp>, column, invariant<dp>>>,
                           layout_v<spec<row, shard<column, dp>, replicate<tp>>>);
  CHECK(describe(p.communicating_axes()) == "tp");
}

}  // namespace layout_plan_transitions
