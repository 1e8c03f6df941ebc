// A transformer block, composed from the library's layers as a template of its strategy. Two strategies train it on
// four ranks to the losses of one rank. They send different collectives.
#include <cstdio>
#include <exception>

#include "plait/comm/threads.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/tensor/redistribution.hpp"

namespace pl = plait;
using pl::batch, pl::hidden, pl::seq, pl::dp, pl::tp;

struct tensor_parallel {  // values between layers are whole on every rank of tp
  using mesh = pl::mesh<pl::axis<dp>, pl::axis<tp>>;
  using residual = pl::spec<pl::shard<batch, dp>, seq, hidden, pl::invariant<tp>>;
  using query_heads = pl::shard<pl::heads, tp>;
  using key_heads = pl::shard<pl::kv_heads, tp>;
  using feed_forward = pl::shard<pl::ffn, tp>;
  using vocabulary = pl::shard<pl::vocab, tp>;
  using loss = pl::spec<pl::partial<dp>, pl::invariant<tp>>;  // a sum over all elements of a residual
};
struct sequence_parallel : tensor_parallel {  // each rank of tp has some positions of them
  using residual = pl::spec<pl::shard<batch, dp>, pl::shard<seq, tp>, hidden>;
  using loss = pl::spec<pl::partial<dp, tp>>;
};

template <class S>
using norm = pl::rms_norm<double, typename S::residual>;
template <class S>
using block = pl::sequential<pl::residual<norm<S>, pl::self_attention<double, S>>,
                             pl::residual<norm<S>, pl::swiglu_mlp<double, S>>>;

template <class S>
block<S> make_block(const pl::context<pl::cpu>& ctx) {
  return block<S>({norm<S>(ctx, 1e-5, "norm1"), {ctx, "attention"}}, {norm<S>(ctx, 1e-5, "norm2"), {ctx, "mlp"}});
}

void show(const pl::ledger& sent) {
  for (const auto& row : sent.rows)
    for (int k = 0; k < pl::collective_kinds; ++k)
      if (const auto calls = row.kinds[static_cast<std::size_t>(k)]; calls.wire > 0)
        std::printf("  %-5s %-14s %d calls, %d bytes on the wire\n", row.label.c_str(),
                    pl::name_of(static_cast<pl::collective>(k)), static_cast<int>(calls.calls),
                    static_cast<int>(calls.wire));
}

template <class S>
void train(const char* name, std::int64_t replicas, std::int64_t tensor) {
  const typename S::mesh mesh(replicas, tensor);
  pl::threads::run(static_cast<int>(mesh.size()), [&](pl::threads::communicator ranks) {
    pl::world world(mesh.shape(), ranks);
    pl::cpu device;
    const auto sizes =
        pl::sizes_of<batch, seq, hidden, pl::heads, pl::kv_heads, pl::head_dim, pl::ffn>(4, 16, 32, 4, 2, 8, 64);
    const pl::context<pl::cpu> ctx{device, world, sizes, /*seed=*/1};
    auto layers = make_block<S>(ctx);
    pl::initialize(ctx, layers);
    pl::adamw<double> optimizer;

    pl::tensor<double, typename S::residual> x(ctx);  // random numbers are keyed by global index: equal on every mesh
    pl::kernels::fill_normal(device, x.data(), x.part(), 7, 0, 0.0, 1.0);
    for (int step = 0; step < 3; ++step) {
      world.ledger().clear();
      pl::gather_parameters(ctx, layers);
      pl::zero_gradients(ctx, layers);
      typename block<S>::saved kept;
      const auto y = layers.forward(ctx, x, &kept);
      pl::tensor<double, pl::dual_t<typename S::residual>> dy(ctx);
      pl::tensor<double, typename S::loss> terms(ctx);  // this rank's term of the mean of (y + x)^2
      terms.data()[0] = 0;
      for (std::int64_t i = 0; i < y.size(); ++i) {
        const double error = y.data()[i] + x.data()[i];
        terms.data()[0] += error * error / (4 * 16 * 32);
        dy.data()[i] = 2 * error / (4 * 16 * 32);
      }
      layers.backward(ctx, x, kept, dy);
      optimizer.begin_step(ctx, /*learning_rate=*/1e-2);
      optimizer.update(ctx, layers);
      const pl::ledger sent = world.ledger();  // since the step began
      const auto loss = pl::redistribute<pl::spec<pl::invariant<dp, tp>>>(ctx, terms);
      if (world.rank() != 0) continue;
      std::printf("%s  step %d  loss %.6f\n", name, step, loss.data()[0]);
      if (step == 2) show(sent);
    }
  });
}

int main() try {
  train<tensor_parallel>("one rank         ", 1, 1);
  train<tensor_parallel>("tensor, 4 ranks  ", 2, 2);
  train<sequence_parallel>("sequence, 4 ranks", 2, 2);
} catch (const std::exception& e) {
  std::fprintf(stderr, "04_block: %s\n", e.what());
  return 1;
}
