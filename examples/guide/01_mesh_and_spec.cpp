// What the types know before anything runs: meshes, specs, duals, plans and their bytes. Standard library only.
#include <cstdio>
#include <exception>

#include "plait/layout/check.hpp"
#include "plait/layout/cost.hpp"
#include "plait/layout/plan.hpp"
#include "plait/layout/rules.hpp"

namespace pl = plait;
using pl::batch, pl::hidden, pl::seq, pl::ffn;
using pl::cp, pl::dp, pl::tp;

// A mesh is an ordered list of axes; an extent that is not written is dynamic.
using mesh = pl::mesh<pl::axis<dp>, pl::axis<cp, 2>, pl::axis<tp, 4>>;

// A spec says how a tensor lies on a mesh. Dims are in memory order; `shard<seq, cp, tp>`: tp splits what cp has split.
using residual = pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp, tp>, hidden>;
using gathered = pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp>, hidden, pl::replicate<tp>>;
using weight = pl::spec<pl::shard<ffn, tp>, hidden, pl::replicate<dp, cp>>;

// The gradient of a value has the dual spec: what is replicated going forward is a pending sum coming back.
static_assert(
    std::is_same_v<pl::dual_t<gathered>, pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp>, hidden, pl::partial<tp>>>);

// Rules of local operations are constexpr functions on layouts. A product over `hidden`, whole on both sides:
constexpr pl::derived_layout up = pl::contract(pl::layout_v<gathered>, pl::layout_v<weight>,
                                               pl::dim_list{pl::dim_of<batch>, pl::dim_of<seq>, pl::dim_of<ffn>});
static_assert(up.verdict.ok());
static_assert(up.result == pl::layout_v<pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp>, pl::shard<ffn, tp>>>);

// The weight's gradient sums over batch and sequence, so it is partial over every axis that shards them: nobody can
// forget a reduction over cp, because it stands in the type.
constexpr pl::derived_layout dweight =
    pl::contract(pl::dual(up.result), pl::layout_v<gathered>, pl::dim_list{pl::dim_of<ffn>, pl::dim_of<hidden>});
static_assert(dweight.result == pl::dual(pl::layout_v<weight>));
static_assert(dweight.result.state_of(pl::axis_of<cp>) == pl::state::partial);

// Between two specs lies a plan of least bytes, and its mirror is the backward plan.
constexpr pl::plan gather = pl::make_plan(pl::layout_v<residual>, pl::layout_v<gathered>);
static_assert(gather.steps.size() == 1 && gather.steps[0].kind == pl::transition_kind::all_gather);
static_assert(pl::mirror(gather).steps[0].kind == pl::transition_kind::reduce_scatter);

// With extents and sizes, bytes are constants.
constexpr pl::mesh_shape shape = mesh(2).shape();
constexpr pl::dim_sizes sizes = [] {
  pl::dim_sizes s;
  s.set(pl::dim_of<batch>, 8);
  s.set(pl::dim_of<seq>, 4096);
  s.set(pl::dim_of<hidden>, 4096);
  s.set(pl::dim_of<ffn>, 14336);
  return s;
}();
static_assert(pl::bytes(gather, shape, sizes, 2) ==
              2u * (4 - 1) * 8 * 4096 * 4096);  // every byte is sent to the 3 others

int main() try {
  std::printf("mesh      %s = %lld ranks\n", pl::describe(shape).c_str(), static_cast<long long>(shape.size()));
  const pl::box part = pl::local_box(pl::layout_v<residual>, shape, sizes, 5);
  std::printf("rank 5    dp %lld, cp %lld, tp %lld; of the residual it holds sequence positions %lld to %lld\n",
              static_cast<long long>(shape.coordinate(5, pl::axis_of<dp>)),
              static_cast<long long>(shape.coordinate(5, pl::axis_of<cp>)),
              static_cast<long long>(shape.coordinate(5, pl::axis_of<tp>)), static_cast<long long>(part.offset[1]),
              static_cast<long long>(part.offset[1] + part.local[1] - 1));
  std::printf("residual  %s\n", pl::describe(pl::layout_v<residual>).c_str());
  std::printf("gather    %s\n", pl::describe(gather).c_str());
  std::printf("backward  %s\n", pl::describe(pl::mirror(gather)).c_str());
  std::printf("bytes     %.1f MB on the wire in bf16, forward\n",
              static_cast<double>(pl::bytes(gather, shape, sizes, 2)) / 1e6);

  // The same functions run on values that are known only now. Moving cp away from outside tp needs an exchange first:
  pl::layout target = pl::layout_v<pl::spec<pl::shard<batch, dp>, pl::shard<seq, tp>, hidden, pl::replicate<cp>>>;
  std::printf("harder    %s\n", pl::describe(pl::make_plan(pl::layout_v<residual>, target, shape, sizes)).c_str());

  // And a mistake that the compiler would refuse in types is the same text here.
  const pl::layout partial = pl::layout_v<pl::spec<hidden, pl::partial<tp>>>,
                   bias = pl::layout_v<pl::spec<hidden, pl::replicate<tp>>>;
  std::printf("mistake   %s\n", pl::describe(pl::pointwise(pl::combine::sum, {&partial, &bias}).verdict).c_str());
} catch (const std::exception& e) {
  std::fprintf(stderr, "01_mesh_and_spec: %s\n", e.what());
  return 1;
}
