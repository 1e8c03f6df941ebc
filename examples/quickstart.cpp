// A small Llama learns to count on four in-process ranks: two for data, two for tensor and sequence parallelism.
#include <cstdio>

#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/parallel/train_step.hpp"

namespace pl = plait;

struct strategy {
  using mesh = pl::mesh<pl::axis<pl::dp>, pl::axis<pl::tp>>;
  using residual = pl::spec<pl::shard<pl::batch, pl::dp>, pl::shard<pl::seq, pl::tp>, pl::hidden>;
  using query_heads = pl::shard<pl::heads, pl::tp>;
  using key_heads = pl::shard<pl::kv_heads, pl::tp>;
  using feed_forward = pl::shard<pl::ffn, pl::tp>;
  using vocabulary = pl::shard<pl::vocab, pl::tp>;
};

int main() try {
  const strategy::mesh mesh{2, 2};
  const pl::llama_config config{
      .vocab = 16, .hidden = 32, .layers = 2, .heads = 4, .kv_heads = 2, .head_dim = 8, .ffn = 64};
  constexpr int microbatches = 2, samples = 8, length = 16;  // `samples` of one microbatch, on all ranks together
  pl::threads::run(static_cast<int>(mesh.size()), [&](pl::threads::communicator ranks) {
    pl::world world(mesh.shape(), ranks);
    pl::cpu device;
    const pl::context<pl::cpu> ctx{device, world, pl::llama_sizes<strategy>(config, mesh.shape(), samples, length), 1};
    pl::llama<float, strategy> model(ctx, config);
    pl::initialize(ctx, model);
    pl::adamw<float> optimizer;
    pl::training_step step(ctx, model, optimizer, microbatches, /*clip=*/1.0);
    for (int i = 0; i < 10; ++i) {
      step.load(ctx, i * microbatches * samples, [](std::int64_t, pl::host_tokens& ids, pl::host_tokens& labels) {
        ids.fill([](auto, auto at) { return at % 16; }), labels.fill([](auto, auto at) { return (at + 1) % 16; });
      });
      optimizer.begin_step(ctx, /*learning_rate=*/1e-2);
      step.run(ctx);
      if (const double loss = step.result(ctx).loss; world.rank() == 0) std::printf("step %d  loss %.4f\n", i, loss);
    }
  });
} catch (const pl::error& e) {
  std::fprintf(stderr, "quickstart: %s\n", e.what());
  return 1;
}
