// Exports a Llama from four ranks as a Hugging Face directory, and loads it into a Llama on two ranks.
#include <cstdio>
#include <exception>
#include <span>

#include "plait/checkpoint/model_weights.hpp"
#include "plait/comm/threads.hpp"
#include "plait/models/export_hugging_face.hpp"
#include "plait/models/hugging_face_directory.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"

namespace pl = plait;
using model_of_layout = pl::llama<float, pl::megatron_sp>;

/// Runs body(context, ranks) on each rank of a mesh.
template <class F>
void on_ranks(const pl::mesh_shape& mesh, const pl::llama_config& config, const F& body) {
  pl::threads::run(static_cast<int>(mesh.size()), [&](pl::threads::communicator all) {
    pl::world world(mesh, all);
    pl::cpu device;
    const pl::context<pl::cpu> ctx{device, world, pl::llama_sizes<pl::megatron_sp>(config, mesh, 2, 8), /*seed=*/1};
    body(ctx, world.root());
  });
}

int main() try {
  pl::llama_config config;
  config.vocab = 50, config.hidden = 32, config.layers = 2, config.heads = 4, config.kv_heads = 2, config.head_dim = 8,
  config.ffn = 64;
  std::uint64_t exported = 0, loaded = 0;  // hashes of all weights
  on_ranks(pl::megatron_sp::mesh(2, 1, 2, 1).shape(), config, [&](const auto& ctx, pl::any_communicator& ranks) {
    model_of_layout model(ctx, config);
    pl::initialize(ctx, model);
    pl::export_hugging_face(ctx, ranks, model, config, "exported");  // each rank writes its parts
    const std::uint64_t hash = pl::weights_hash(ctx, model);
    if (ranks.rank() == 0) exported = hash;
  });

  const pl::model_directory found = pl::open_model_directory("exported");
  std::printf("%d tensors, %d layers, the first tensor is %s\n", static_cast<int>(found.entries.size()),
              static_cast<int>(found.config.layers), found.entries.front().name.c_str());
  on_ranks(pl::megatron_sp::mesh(1, 1, 2, 1).shape(), found.config, [&](const auto& ctx, pl::any_communicator& ranks) {
    model_of_layout model(ctx, found.config);
    pl::load_weights(ctx, model, std::span<const pl::weight_tensor>(found.entries), found.source());
    const std::uint64_t hash = pl::weights_hash(ctx, model);
    if (ranks.rank() == 0) loaded = hash;
  });
  std::printf("exported from dp=2, tp=2 and loaded on tp=2: the weights are %s\n",
              exported == loaded ? "equal" : "not equal");

  try {  // a directory of another model
    pl::llama_config larger = found.config;
    larger.layers = 3;
    on_ranks(pl::megatron_sp::mesh(1, 1, 1, 1).shape(), larger, [&](const auto& ctx, pl::any_communicator&) {
      model_of_layout model(ctx, larger);
      pl::load_weights(ctx, model, std::span<const pl::weight_tensor>(found.entries), found.source());
    });
  } catch (const pl::error& e) {
    std::printf("%.113s...\n", e.what());
  }
} catch (const std::exception& e) {
  std::fprintf(stderr, "10_hugging_face: %s\n", e.what());
  return 1;
}
