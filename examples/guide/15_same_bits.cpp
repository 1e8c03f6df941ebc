// Trains one Llama on several meshes, at several levels of ZeRO, and compares all bits of the weights.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <set>
#include <string>

#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/train_step.hpp"

namespace pl = plait;

/// The layout of a run. Runs differ in nothing else.
struct layout_of_run {
  const char* name;
  std::int64_t dp, cp, tp;
  int microbatches;
  pl::zero_level level;
};

constexpr std::int64_t samples = 16, length = 32;  // samples in a step, and tokens in a sample

/// Fills this rank's part of microbatch k. The order of sums determines which samples of the step a microbatch has.
void fill(const pl::context<pl::cpu>& context, int k, int microbatches, pl::host_tokens& ids, pl::host_tokens& labels) {
  const pl::box& part = ids.stored_part();
  const std::int64_t first =
      pl::first_sample_in_step(context.deterministic, k, microbatches, part.global[0], part.offset[0], part.local[0]);
  for (std::int64_t row = 0; row < ids.rows(); ++row)
    for (const pl::token_run& run : ids.runs())
      for (std::int64_t i = 0; i < run.length; ++i) {
        const std::int64_t at = (first + row) * length + run.position + i;
        ids.row(row)[run.at + i] = at * at % 31;
        labels.row(row)[run.at + i] = (at + 1) * (at + 1) % 31;
      }
}

/// Returns the hash of the weights after three steps.
std::uint64_t train(const layout_of_run& run, const pl::deterministic_leaves& leaves) {
  const pl::mesh_shape mesh = pl::megatron_sp::mesh(run.dp, run.cp, run.tp, 1).shape();
  std::uint64_t hash = 0;
  pl::threads::run(static_cast<int>(mesh.size()), [&](pl::threads::communicator all) {
    pl::world world(mesh, all);
    pl::cpu device({.deterministic = static_cast<bool>(leaves)});
    const pl::llama_config config{
        .vocab = 32, .hidden = 32, .layers = 2, .heads = 4, .kv_heads = 4, .head_dim = 8, .ffn = 64};
    const pl::dim_sizes sizes = pl::llama_sizes<pl::megatron_sp>(config, mesh, samples / run.microbatches, length);
    const pl::context<pl::cpu> context{device, world, sizes, /*seed=*/1, leaves};
    pl::llama<float, pl::megatron_sp> model(context, config);
    pl::initialize(context, model);
    pl::adamw<float> optimizer;
    pl::pipeline_options options;
    options.parallel.level = run.level;
    pl::training_step step(context, model, optimizer, run.microbatches, /*clip=*/1.0, options);
    for (std::int64_t i = 0; i < 3; ++i) {
      step.load(context, i * samples, [&](std::int64_t k, pl::host_tokens& ids, pl::host_tokens& labels) {
        fill(context, static_cast<int>(k), run.microbatches, ids, labels);
      });
      optimizer.begin_step(context, /*learning_rate=*/1e-2);
      step.run(context);
    }
    const std::uint64_t found = pl::weights_hash(context, model);
    if (world.rank() == 0) hash = found;
  });
  return hash;
}

int main() try {
  const layout_of_run layouts[] = {{"one rank", 1, 1, 1, 1, pl::zero_level::replicated},
                                   {"4 microbatches", 1, 1, 1, 4, pl::zero_level::replicated},
                                   {"dp=2, tp=2", 2, 1, 2, 1, pl::zero_level::replicated},
                                   {"dp=2, cp=2, ZeRO 3", 2, 2, 1, 2, pl::zero_level::parameters}};
  for (const pl::deterministic_leaves& leaves :
       {pl::deterministic_leaves{}, pl::deterministic_leaves(pl::deterministic<8, 16, 4>{})}) {
    const std::uint64_t first = train(layouts[0], leaves);
    std::printf("%s\n", leaves ? "with sums in one order" : "with sums in the fastest order");
    for (const layout_of_run& layout : layouts)
      std::printf("  %-18s  the bits of %s\n", layout.name,
                  train(layout, leaves) == first ? "one rank" : "another run");
  }
} catch (const std::exception& e) {
  std::fprintf(stderr, "15_same_bits: %s\n", e.what());
  return 1;
}
