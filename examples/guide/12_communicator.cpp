// Runs a linear on the communicator of mailbox.hpp, after the test suite that every communicator must pass.
#include <cstdio>
#include <exception>

#include "mailbox.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/nn/linear.hpp"
#include "plait/testing/conformance.hpp"

namespace pl = plait;
using pl::batch, pl::ffn, pl::hidden, pl::tp;

struct row_parallel {  // each rank has some features of the input, so the product is a sum over ranks
  using mesh = pl::mesh<pl::axis<tp>>;
  using input = pl::spec<batch, pl::shard<ffn, tp>>;
  using weight = pl::spec<hidden, pl::shard<ffn, tp>>;
  using output = pl::spec<batch, hidden, pl::invariant<tp>>;
};

int main() try {
  mail::run(3, [](mail::mailbox comm) {
    pl::testing::short_conformance(comm);
    if (comm.rank() == 0) std::printf("the communicator conforms\n");
  });
  for (const int ranks : {1, 4})
    mail::run(ranks, [&](mail::mailbox comm) {
      pl::world world(row_parallel::mesh(ranks).shape(), pl::any_communicator(comm));
      pl::cpu device;
      const pl::context<pl::cpu> ctx{device, world, pl::sizes_of<batch, hidden, ffn>(4, 8, 16), /*seed=*/1};
      pl::linear<double, row_parallel> down(ctx, "down");
      pl::initialize(ctx, down);
      pl::gather_parameters(ctx, down);
      pl::tensor<double, row_parallel::input> x(ctx);
      pl::kernels::fill_normal(device, x.data(), x.part(), 7, 0, 0.0, 1.0);
      const auto y = down.forward(ctx, x);
      double sum = 0;
      for (std::int64_t i = 0; i < y.size(); ++i) sum += y.data()[i];
      if (comm.rank() == 0)
        std::printf("ranks: %d, sum of the output: %.9f, sent: %d bytes\n", ranks, sum,
                    static_cast<int>(world.ledger().total().wire));
    });
  mail::run(2, [](mail::mailbox comm) {  // if a rank fails, ranks that wait for it end, too
    if (comm.rank() == 1) pl::fail("rank 1 has failed");
    comm.barrier();
  });
} catch (const std::exception& e) {
  std::printf("error: %s\n", e.what());
}
