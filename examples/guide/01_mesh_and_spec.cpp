// Meshes, specs, duals and rules, all at compile time. Needs only the standard library.
#include <cstdio>
#include <exception>

#include "plait/layout/check.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/rules.hpp"

namespace pl = plait;
using pl::batch, pl::hidden, pl::seq, pl::ffn;
using pl::cp, pl::dp, pl::tp;

// A mesh is an ordered list of axes. The extent of dp is dynamic.
using mesh = pl::mesh<pl::axis<dp>, pl::axis<cp, 2>, pl::axis<tp, 4>>;

// A spec says how a tensor lies on a mesh. Dims are in memory order. `shard<seq, cp, tp>` splits seq by cp, then by tp.
using residual = pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp, tp>, hidden>;
using gathered = pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp>, hidden, pl::replicate<tp>>;
using weight = pl::spec<pl::shard<ffn, tp>, hidden, pl::replicate<dp, cp>>;

// The gradient of a value has the dual spec: the gradient of a replicated value is a pending sum.
static_assert(
    std::is_same_v<pl::dual_t<gathered>, pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp>, hidden, pl::partial<tp>>>);

// Rules of local operations are constexpr functions on layouts. This is a product over `hidden`, whole in both.
constexpr pl::derived_layout up = pl::contract(pl::layout_v<gathered>, pl::layout_v<weight>,
                                               pl::dim_list{pl::dim_of<batch>, pl::dim_of<seq>, pl::dim_of<ffn>});
static_assert(up.verdict.ok());
static_assert(up.result == pl::layout_v<pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp>, pl::shard<ffn, tp>>>);

// The weight's gradient sums over batch and sequence, so it is partial over every axis that shards them. The reduction
// over cp cannot be forgotten, because the type has it.
constexpr pl::derived_layout dweight =
    pl::contract(pl::dual(up.result), pl::layout_v<gathered>, pl::dim_list{pl::dim_of<ffn>, pl::dim_of<hidden>});
static_assert(dweight.result == pl::dual(pl::layout_v<weight>));
static_assert(dweight.result.state_of(pl::axis_of<cp>) == pl::state::partial);

constexpr pl::mesh_shape shape = mesh(2).shape();
constexpr pl::dim_sizes sizes = pl::sizes_of<batch, seq, hidden, ffn>(8, 4096, 4096, 14336);

int main() try {
  std::printf("mesh      %s = %lld ranks\n", pl::describe(shape).c_str(), static_cast<long long>(shape.size()));
  const pl::box part = pl::local_box(pl::layout_v<residual>, shape, sizes, 5);
  std::printf("rank 5    dp %lld, cp %lld, tp %lld; of the residual it holds sequence positions %lld to %lld\n",
              static_cast<long long>(shape.coordinate(5, pl::axis_of<dp>)),
              static_cast<long long>(shape.coordinate(5, pl::axis_of<cp>)),
              static_cast<long long>(shape.coordinate(5, pl::axis_of<tp>)), static_cast<long long>(part.offset[1]),
              static_cast<long long>(part.offset[1] + part.local[1] - 1));
  std::printf("gathered  %s\n", pl::describe(pl::layout_v<gathered>).c_str());
  std::printf("its dual  %s\n", pl::describe(pl::dual(pl::layout_v<gathered>)).c_str());
  std::printf("up        %s\n", pl::describe(up.result).c_str());
  std::printf("dweight   %s\n", pl::describe(dweight.result).c_str());

  // Rules also take layouts that are known only at run time. A mistake there has the text that the compiler prints.
  const pl::layout partial = pl::layout_v<pl::spec<hidden, pl::partial<tp>>>,
                   bias = pl::layout_v<pl::spec<hidden, pl::replicate<tp>>>;
  std::printf("mistake   %s\n", pl::describe(pl::pointwise(pl::combine::sum, {&partial, &bias}).verdict).c_str());
} catch (const std::exception& e) {
  std::fprintf(stderr, "01_mesh_and_spec: %s\n", e.what());
  return 1;
}
