// Trains a tensor-parallel MLP on eight in-process ranks. Three specs for each layer are all its parallelism. plait
// derives every collective of the forward pass, the backward pass and the gradients. The program names only the sum of
// the printed loss. The losses equal those of one rank.
#include <cmath>
#include <cstdio>
#include <exception>

#include "plait/comm/threads.hpp"
#include "plait/comm/typed.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/parallel/optim/adamw.hpp"

namespace pl = plait;
using pl::batch, pl::hidden, pl::ffn;
using pl::dp, pl::tp;

using mesh = pl::mesh<pl::axis<dp>, pl::axis<tp>>;

// Boundaries mention every axis of the mesh: rows of the batch over dp, and the features whole on every rank of tp.
using features = pl::spec<pl::shard<batch, dp>, hidden, pl::invariant<tp>>;
using wide = pl::spec<pl::shard<batch, dp>, pl::shard<ffn, tp>>;

struct up {  // column-parallel: the input is used as replicate<tp>, so its gradient is all-reduced (Megatron's f)
  using mesh = ::mesh;
  using input = features;
  using weight = pl::spec<pl::shard<ffn, tp>, hidden>;
  using output = wide;
  static constexpr bool bias = true;
};
struct down {  // row-parallel: the product is partial over tp, so the output is all-reduced (Megatron's g)
  using mesh = ::mesh;
  using input = wide;
  using weight = pl::spec<hidden, pl::shard<ffn, tp>>;
  using output = features;
  static constexpr bool bias = true;  // added after the reduction: before it, this would not compile
};

void train(const mesh& shape) {
  pl::threads::run(static_cast<int>(shape.size()), [&](pl::threads::communicator ranks) {
    pl::world world(shape.shape(), ranks);
    pl::cpu device;
    const pl::context<pl::cpu> ctx{device, world, pl::sizes_of<batch, hidden, ffn>(64, 32, 128), /*seed=*/42};

    pl::sequential mlp{pl::linear<double, up>(ctx, "up"), pl::linear<double, down>(ctx, "down")};
    pl::adamw<double> optimizer;
    pl::initialize(ctx, mlp);

    for (int step = 0; step <= 100; ++step) {
      // Data: y is x shifted by one feature. Random numbers are keyed by global index, so x is the same on every mesh.
      pl::tensor<double, features> x(ctx);
      pl::kernels::fill_normal(device, x.data(), x.part(), 7, static_cast<std::uint64_t>(step), 0.0, 1.0);
      decltype(mlp)::saved kept;
      pl::gather_parameters(ctx, mlp);  // layers need current values of their parameters
      pl::zero_gradients(ctx, mlp);
      const auto y = mlp.forward(ctx, x, &kept);
      pl::tensor<double, pl::dual_t<features>> dy(ctx);
      double loss = 0;
      const std::int64_t columns = x.part().local[1];
      for (std::int64_t i = 0; i < x.size(); ++i) {
        const double wanted = x.data()[i - i % columns + (i + 1) % columns];
        const double error = y.data()[i] - wanted;
        loss += error * error / (64 * 32);
        dy.data()[i] = 2 * error / (64 * 32);
      }
      mlp.backward(ctx, x, kept, dy);

      // The types of the parameters determine the reductions of gradients over dp. None can be forgotten, because the
      // optimizer takes only the result of `reduce`.
      optimizer.begin_step(ctx, 1e-2);
      optimizer.update(ctx, mlp);
      const pl::part<double, pl::spec<pl::partial<dp>, pl::invariant<tp>>> terms(ctx, &loss);
      pl::group_over<dp>(world).all_reduce<pl::spec<pl::invariant<dp, tp>>>(terms);
      if (world.rank() == 0 && step % 25 == 0) std::printf("  step %3d  loss %.6f\n", step, loss);
    }
    if (world.rank() == 0 && world.size() > 1)
      for (const auto& row : world.ledger().rows)
        std::printf("  %-6s %8.2f MB on the wire\n", row.label.c_str(),
                    static_cast<double>(world.ledger().total(row.label).wire) / 1e6);
  });
}

int main() try {
  std::printf("one rank\n");
  train(mesh(1, 1));
  std::printf("dp=2, tp=4: eight ranks\n");
  train(mesh(2, 4));
} catch (const std::exception& e) {
  std::fprintf(stderr, "03_linear: %s\n", e.what());
  return 1;
}
