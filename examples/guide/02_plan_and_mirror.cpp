// Plans between two specs, their mirrors, which are the plans of gradients, and the bytes of both. Needs only the
// standard library.
#include <cstdio>
#include <exception>

#include "plait/layout/check.hpp"
#include "plait/layout/cost.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/plan.hpp"

namespace pl = plait;
using pl::batch, pl::hidden, pl::seq, pl::ffn;
using pl::cp, pl::dp, pl::tp;

using mesh = pl::mesh<pl::axis<dp>, pl::axis<cp, 2>, pl::axis<tp, 4>>;
using residual = pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp, tp>, hidden>;
using gathered = pl::spec<pl::shard<batch, dp>, pl::shard<seq, cp>, hidden, pl::replicate<tp>>;

// `make_plan` finds the plan that sends the fewest bytes. Its mirror is the backward plan.
constexpr pl::plan gather = pl::make_plan(pl::layout_v<residual>, pl::layout_v<gathered>);
static_assert(gather.steps.size() == 1 && gather.steps[0].kind == pl::transition_kind::all_gather);
static_assert(pl::mirror(gather).steps[0].kind == pl::transition_kind::reduce_scatter);

// Extents and sizes are constants here, so bytes are constants.
constexpr pl::mesh_shape shape = mesh(2).shape();
constexpr pl::dim_sizes sizes = pl::sizes_of<batch, seq, hidden, ffn>(8, 4096, 4096, 14336);
static_assert(pl::bytes(gather, shape, sizes, 2) ==
              2u * (4 - 1) * 8 * 4096 * 4096);  // every byte is sent to the 3 others

void show(const char* name, const pl::plan& p) {
  std::printf("%s %s\n", name, pl::describe(p).c_str());
  std::printf("  mirror %s\n", pl::describe(pl::mirror(p)).c_str());
  std::printf("  %.1f MB forward, %.1f MB backward, on the wire in bf16\n",
              static_cast<double>(pl::bytes(p, shape, sizes, 2)) / 1e6,
              static_cast<double>(pl::bytes(pl::mirror(p), shape, sizes, 2)) / 1e6);
}

int main() try {
  show("gather", gather);

  // A weight that is stored in shards over dp, and used whole on each rank of dp.
  using stored = pl::spec<pl::shard<ffn, tp>, pl::shard<hidden, dp>>;
  using used = pl::spec<pl::shard<ffn, tp>, hidden, pl::replicate<dp>>;
  show("weight", pl::make_plan(pl::layout_v<stored>, pl::layout_v<used>, shape, sizes));

  // The same functions take layouts that are known only at run time. cp is the outer axis, so ranks exchange first.
  const pl::layout target = pl::layout_v<pl::spec<pl::shard<batch, dp>, pl::shard<seq, tp>, hidden, pl::replicate<cp>>>;
  show("harder", pl::make_plan(pl::layout_v<residual>, target, shape, sizes));

  // The step from each state of an axis to each other state, and its mirror.
  const pl::layout states[] = {
      pl::layout_v<pl::spec<seq, pl::invariant<tp>>>, pl::layout_v<pl::spec<seq, pl::replicate<tp>>>,
      pl::layout_v<pl::spec<pl::shard<seq, tp>>>, pl::layout_v<pl::spec<seq, pl::partial<tp>>>};
  std::printf("%-24s %-15s %s\n", "from -> to", "step", "its mirror");
  for (const pl::layout& from : states)
    for (const pl::layout& to : states) {
      const pl::plan p = pl::make_plan(from, to, shape, sizes);
      if (p.steps.empty()) continue;
      const pl::redistribution_step step = p.steps[0], back = pl::mirror(p).steps[0];
      std::printf("%-10s -> %-10s %-15s %s\n", pl::name_of(step.from), pl::name_of(step.to), pl::name_of(step.kind),
                  pl::name_of(back.kind));
    }
} catch (const std::exception& e) {
  std::fprintf(stderr, "02_plan_and_mirror: %s\n", e.what());
  return 1;
}
