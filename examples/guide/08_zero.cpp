// ZeRO 3 in a program with its own loop and its own optimizer. The weights of its two layers are whole only while they
// are used.
#include <cstdio>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/comm/typed.hpp"
#include "plait/nn/linear.hpp"
#include "plait/parallel/units.hpp"

namespace pl = plait;

struct up {
  using mesh = pl::mesh<pl::axis<pl::dp>>;
  using input = pl::spec<pl::shard<pl::batch, pl::dp>, pl::hidden>;
  using weight = pl::spec<pl::ffn, pl::hidden>;
  using output = pl::spec<pl::shard<pl::batch, pl::dp>, pl::ffn>;
};
struct down {
  using mesh = up::mesh;
  using input = up::output;
  using weight = pl::spec<pl::hidden, pl::ffn>;
  using output = up::input;
};

int main() try {
  const up::mesh mesh{4};
  pl::threads::run(4, [&](pl::threads::communicator all) {
    pl::world world(mesh.shape(), all);
    pl::cpu device;
    const pl::context<pl::cpu> ctx{device, world, pl::sizes_of<pl::batch, pl::hidden, pl::ffn>(8, 16, 32), 1};
    pl::linear<float, up> first(ctx, "first");
    pl::linear<float, down> second(ctx, "second");
    pl::each_parameter([&](auto& p) { p.initialize(ctx); }, first, second);

    pl::parameter_units<float, pl::cpu> units(ctx, pl::zero_level::parameters, {});
    units.add(ctx, 0, [&](auto&& f) { first.visit(f); });   // unit 0: each rank keeps a quarter of it
    units.add(ctx, 0, [&](auto&& f) { second.visit(f); });  // unit 1

    pl::tensor<float, up::input> x(ctx);
    for (int i = 0; i < x.size(); ++i) x.data()[i] = 0.1f * static_cast<float>((i + all.rank()) % 7);
    for (int step = 0; step < 3; ++step) {
      units.begin_step(ctx);
      pl::linear<float, up>::saved kept_first;
      pl::linear<float, down>::saved kept_second;
      units.gather(ctx, 0), units.enter(ctx, 0, false);  // before a pass uses a unit
      const auto h = first.forward(ctx, x, &kept_first);
      units.release(0);
      units.gather(ctx, 1), units.enter(ctx, 1, true);
      const auto y = second.forward(ctx, h, &kept_second);

      double loss = 0;
      pl::tensor<float, pl::dual_t<up::input>> dy(ctx);
      for (int i = 0; i < y.size(); ++i) {  // 0.5 (y - 1)^2, summed over all samples
        loss += 0.5 * (y.data()[i] - 1) * (y.data()[i] - 1);
        dy.data()[i] = y.data()[i] - 1;
      }
      const auto dh = second.backward(ctx, h, kept_second, dy);
      units.reduce(ctx, 1), units.release(1);  // the reduction runs while the next unit computes
      units.gather(ctx, 0), units.enter(ctx, 0, true);
      first.backward(ctx, x, kept_first, dh);
      units.reduce(ctx, 0), units.release(0);

      std::vector<pl::reduced_gradient<float, pl::cpu>> gradients;
      for (int unit = 0; unit < units.size(); ++unit) units.finish_reduction(ctx, unit, gradients);
      for (const auto& g : gradients) {  // the program's own optimizer, on this rank's slice
        const auto weights = g.parameter().begin_update();
        for (int i = 0; i < g.size(); ++i) weights.master[i] -= 0.01f * g.data()[i];
      }
      const pl::part<double, pl::spec<pl::partial<pl::dp>>> terms(ctx, &loss);
      pl::group_over<pl::dp>(world).all_reduce<pl::spec<pl::invariant<pl::dp>>>(terms);
      if (all.rank() == 0) std::printf("step %d  loss %.4f\n", step, loss);
    }
  });
} catch (const pl::error& e) {
  std::fprintf(stderr, "08_zero: %s\n", e.what());
  return 1;
}
