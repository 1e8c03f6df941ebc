// A strategy that the library does not have, with axes of its own: two-dimensional tensor parallelism. Weights are
// sharded on both of their dims, over a `row` and a `column` axis, so each rank holds 1/(rows x columns) of every
// matrix, and the residual stream is sharded over the hidden dim instead of the sequence. The library does not know
// these axes: the linears and the norm derive what they need from the specs.
#include <cmath>
#include <cstdio>
#include <exception>

#include "plait/comm/threads.hpp"
#include "plait/layout/check.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"
#include "plait/parallel/parameter_hashes.hpp"

namespace pl = plait;
using pl::batch, pl::hidden, pl::ffn, pl::dp;

struct row : pl::axis_tag<"row"> {};
struct column : pl::axis_tag<"column"> {};

using mesh = pl::mesh<pl::axis<dp>, pl::axis<row>, pl::axis<column>>;

struct grid {
  using stream = pl::spec<pl::shard<batch, dp>, pl::shard<hidden, column>, pl::invariant<row>>;
  using inner = pl::spec<pl::shard<batch, dp>, pl::shard<ffn, row>, pl::invariant<column>>;
};
struct up {
  using mesh = ::mesh;
  using input = grid::stream;
  using weight = pl::spec<pl::shard<ffn, row>, pl::shard<hidden, column>>;
  using output = grid::inner;  // the product is partial over `column`: all-reduced there
};
struct down {
  using mesh = ::mesh;
  using input = grid::inner;
  using weight = pl::spec<pl::shard<hidden, column>, pl::shard<ffn, row>>;
  using output = grid::stream;  // partial over `row`: all-reduced there
};

using norm = pl::rms_norm<double, grid::stream>;  // rows are split over `column`: the statistics are reduced inside
using mlp = pl::sequential<pl::linear<double, up>, pl::linear<double, down>>;
using branch = pl::residual<norm, mlp>;

double run(const mesh& shape) {
  double result = 0;
  pl::threads::run(static_cast<int>(shape.size()), [&](pl::threads::communicator ranks) {
    pl::world world(shape.shape(), ranks);
    pl::cpu device;
    const pl::context<pl::cpu> ctx{device, world, pl::sizes_of<batch, hidden, ffn>(8, 24, 48), /*seed=*/1};
    branch block(norm(ctx), mlp(pl::linear<double, up>(ctx, "up"), pl::linear<double, down>(ctx, "down")));
    block.visit([&](auto& p) {
      p.initialize(ctx);
      p.gather(ctx);
      p.zero_gradient(ctx);
      if (world.rank() == 0 && shape.size() > 1)
        std::printf("  %-12s stored %s\n  %12s gradient %s\n", p.name().c_str(), pl::describe(p.stored()).c_str(), "",
                    pl::describe(pl::dual(p.used())).c_str());
    });

    pl::tensor<double, grid::stream> x(ctx);
    pl::kernels::fill_normal(device, x.data(), x.part(), 2, 0, 0.0, 1.0);
    branch::saved kept;
    const auto y = block.forward(ctx, x, &kept);
    pl::tensor<double, pl::dual_t<grid::stream>> dy(ctx);
    pl::kernels::fill_normal(device, dy.data(), dy.part(), 3, 0, 0.0, 1.0);
    block.backward(ctx, x, kept, dy);

    double sum = 0;  // a number in which every element of every gradient has its own weight
    block.visit([&](auto& p) {
      const auto gradient = p.reduce(ctx);
      const auto whole = pl::gather_whole(ctx, p, gradient.data());
      for (std::size_t i = 0; i < whole.size(); ++i) sum += std::sin(static_cast<double>(i)) * whole[i];
    });
    if (world.rank() == 0) result = sum;
  });
  return result;
}

int main() try {
  const double one = run(mesh(1, 1, 1));
  std::printf("row=2, column=3, dp=2: twelve ranks\n");
  const double many = run(mesh(2, 2, 3));
  std::printf("gradients: %.15g on one rank, %.15g on twelve\n", one, many);
  return std::abs(one - many) < 1e-10 * std::abs(one) ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "custom_strategy: %s\n", e.what());
  return 1;
}
