// stand-in: never, since llama.cpp trains this model there
// A whole Llama with its step in a file that nvcc compiles: it trains on the GPU.
#include <doctest/doctest.h>

#include <cstdint>

#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"

using namespace plait;

TEST_CASE("a Llama that nvcc compiled learns to count") {
  const megatron_sp::mesh mesh{1, 1, 2, 1};
  const llama_config config{
      .vocab = 16, .hidden = 32, .layers = 1, .heads = 4, .kv_heads = 2, .head_dim = 8, .ffn = 64};
  threads::run(static_cast<int>(mesh.size()), cuda::options{}, [&](threads::communicator ranks, cuda& device) {
    world world(mesh.shape(), ranks);
    const context<cuda> ctx{device, world, llama_sizes<megatron_sp>(config, mesh.shape(), 4, 16), 1};
    llama<bf16, megatron_sp, cuda> model(ctx, config);
    initialize(ctx, model);
    adamw<bf16, cuda> optimizer;
    training_step step(ctx, model, optimizer, 1, 1.0);
    double first = 0, last = 0;
    for (int i = 0; i < 10; ++i) {
      step.load(ctx, i * 4, [](std::int64_t, host_tokens& ids, host_tokens& labels) {
        ids.fill([](auto, auto at) { return at % 16; }), labels.fill([](auto, auto at) { return (at + 1) % 16; });
      });
      optimizer.begin_step(ctx, 1e-2);
      step.run(ctx);
      last = step.result(ctx).loss;
      if (i == 0) first = last;
    }
    CHECK(first > 2);
    CHECK(last < first / 2);
  });
}
