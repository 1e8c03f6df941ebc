// program: layout_plans
#include <doctest/doctest.h>

#include "plait/layout/check.hpp"
#include "plait/layout/plan.hpp"

using namespace plait;

TEST_CASE("a layout is described like its spec") {
  CHECK(describe(layout_v<spec<shard<seq, cp, tp>, hidden, partial<dp>>>) ==
        "<shard<seq, cp, tp>, hidden, partial<dp>>");
  CHECK(describe(layout_v<spec<hidden, invariant<tp, dp>, replicate<cp>>>) ==
        "<hidden, replicate<cp>, invariant<dp, tp>>");
  CHECK(describe(layout{}) == "<>");
}

TEST_CASE("a mesh is described by its extents") {
  CHECK(describe(mesh<axis<dp>, axis<tp, 4>>{2}.shape()) == "2 dp * 4 tp");
  CHECK(describe(mesh<axis<dp>, axis<tp, 4>>::static_shape()) == "? dp * 4 tp");
}

TEST_CASE("a plan is described by its steps") {
  const layout a = layout_v<spec<shard<seq, tp>, hidden>>, b = layout_v<spec<seq, hidden, replicate<tp>>>;
  CHECK(describe(make_plan(a, b)) ==
        "<shard<seq, tp>, hidden> -> <seq, hidden, replicate<tp>>\n"
        "  all_gather of seq over tp (varying -> replicated): <seq, hidden, replicate<tp>>");
  const plan gather = make_plan(layout_v<spec<shard<seq, cp, tp>>>, layout_v<spec<seq, replicate<cp, tp>>>);
  REQUIRE(gather.steps.size() == 1);
  CHECK(describe(gather.steps[0]) == "all_gather of seq over cp, tp (varying -> replicated)");
  CHECK(describe(make_plan(a, a)) == "<shard<seq, tp>, hidden> -> <shard<seq, tp>, hidden>: nothing to do");
  CHECK(describe(make_plan(a, layout_v<spec<hidden, seq>>)) ==
        "<shard<seq, tp>, hidden> -> <hidden, seq>: the dims are not the ones expected here, in this order "
        "[output: <seq, hidden> expected, <hidden, seq> given]");
}

TEST_CASE("a verdict is described by its rule and facts, and throws this text") {
  const derived_layout bias =
      pointwise(combine::sum, {&layout_v<spec<seq, hidden, partial<tp>>>, &layout_v<spec<hidden, invariant<tp>>>});
  const std::string text = std::string(text_of(layout_error::partial_plus_other)) + " [axis tp, partial and invariant]";
  CHECK(describe(bias.verdict) == text);
  CHECK_THROWS_WITH_AS(enforce(bias.verdict, "mlp.down.bias"), ("mlp.down.bias: " + text).c_str(), error);
  const dim_list own_first{dim_of<ffn>, dim_of<hidden>}, contracted_first{dim_of<hidden>, dim_of<ffn>};
  CHECK(describe(compare_dims(operand::weight, own_first, contracted_first)) ==
        std::string(text_of(layout_error::dims_differ)) + " [weight: <ffn, hidden> expected, <hidden, ffn> given]");
  CHECK(describe(verdict{}) == "ok");
  CHECK_NOTHROW(enforce(verdict{}, "nowhere"));
}

TEST_CASE("a boundary names every axis of its mesh and no other") {
  const mesh_shape shape = mesh<axis<dp>, axis<tp, 4>>{2}.shape();
  CHECK(check_boundary(layout_v<spec<shard<batch, dp>, hidden, invariant<tp>>>, shape).ok());
  CHECK(describe(check_boundary(layout_v<spec<batch, shard<hidden, tp>>>, shape)) ==
        std::string(text_of(layout_error::axis_unmentioned)) + " [axis dp]");
  CHECK(describe(check_boundary(layout_v<spec<shard<batch, dp>, shard<hidden, tp>, invariant<cp>>>, shape)) ==
        std::string(text_of(layout_error::axis_unknown)) + " [axis cp]");
}
