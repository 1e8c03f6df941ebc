// checkpoint_plan [--rounds N] [--writers N]
#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/held_state.hpp"
#include "plait/checkpoint/manifest.hpp"
#include "plait/device/counting.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/placement.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/parse.hpp"
#include "timing.hpp"

/// Measures the cost of planning a save on one processor, for Llama 3 405B with AdamW on 16,384 ranks (dp 128, pp 16,
/// tp 8; Dubey et al. 2024, table 4, without cp). It times one rank's plan, which needs only layouts, and the work of
/// rank 0 on the notes of all writers. No memory is allocated for the model, and nothing is written.
namespace {

using namespace plait;

constexpr int stages = 16, microbatches = 16;

llama_config big_llama() {
  llama_config c;
  c.vocab = 128256;
  c.hidden = 16384;
  c.layers = 126;
  c.heads = 128;
  c.kv_heads = 8;
  c.head_dim = 128;
  c.ffn = 53248;
  c.max_position = 131072;
  c.rope_theta = 500000;
  return c;
}

struct plan_cost {
  double seconds = 0;
  std::size_t boxes = 0, bytes = 0;
};

/// Returns the costs of the fastest of some rounds on one rank. Each round makes the model first.
plan_cost rank_plan(std::int64_t rank, zero_level level, std::int64_t rounds) {
  using strategy_type = megatron_sp;
  using stage_type = llama<bf16, strategy_type, counting_device>;
  const llama_config config = big_llama();
  const mesh_shape mesh =
      plait::mesh<axis<dp>, axis<pp>, axis<cp>, axis<tp>, axis<tp_rep>>{128, stages, 1, 8, 1}.shape();
  pipeline_world ranks = pipeline_world::counting(mesh, rank);
  counting_device device(false);
  const context<counting_device> ctx{device, ranks.stage(),
                                     llama_sizes<strategy_type>(config, ranks.stage().shape(), 128, 8192), 1};
  pipeline_options options;
  options.parallel.level = level;
  const llama_part_times parts{.layer = {1, 2, 1, 1}, .embedding = {0, 0, 0, 0}, .head = {0, 0, 0, 0}};
  pipeline<stage_type> model(
      ctx, ranks.along(), parse_schedule("1f1b", stages, microbatches),
      split_layers(stage_costs_of(parts, config.layers), stages),
      [&](stage_layers part, stage_type* first) {
        return std::make_unique<stage_type>(ctx, config, llama_options{}, part, first);
      },
      options);
  adamw<bf16, counting_device> optimizer;
  plan_cost cost;
  std::vector<double> times;
  for (std::int64_t round = 0; round < rounds; ++round)
    times.push_back(bench::processor_seconds([&] {
      std::vector<held_tensor> held = held_weights(ctx, model);
      for (held_tensor& h : held_optimizer(ctx, model, optimizer)) held.push_back(std::move(h));
      const share_plan plan = plan_share(ctx, held);
      cost.boxes = plan.boxes.size();
      cost.bytes = plan.bytes;
    }));
  cost.seconds = bench::least(times);
  return cost;
}

/// Returns the note of one writer: 123 matrices, which are 41 weights and their two moments, with a row each.
written_share note_of(std::int64_t writer, std::int64_t writers) {
  written_share share{{data_file_name(static_cast<std::uint32_t>(writer)), 4096, 4096, 1}, {}};
  for (int t = 0; t < 123; ++t) {
    stored_tensor& tensor = share.tensors.emplace_back();
    tensor.name = cat({"optim.model.layers.", t, ".mlp.down_proj.weight.exp_avg"});
    tensor.shape = {writers, 4096};
    stored_box& b = tensor.boxes.emplace_back();
    b.offset = {writer, 0};
    b.extent = {1, 4096};
    b.stored = {0, static_cast<std::uint32_t>(writer), share.file.bytes, 4096 * 4};
    share.file.bytes += b.stored.bytes;
  }
  return share;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const bench::numbers given(argc, argv);
    const std::int64_t rounds = given.of("--rounds", 5), writers = given.of("--writers", 16384);
    bool missed = false;
    std::printf("the plan of one rank of 16384, processor seconds (target: below 0.5)\n");
    for (const auto& [name, level] : {std::pair{"replicated", zero_level::replicated},
                                      {"zero1", zero_level::optimizer},
                                      {"zero3", zero_level::parameters}})
      for (const std::int64_t rank : {std::int64_t{0}, std::int64_t{16383}}) {
        const plan_cost cost = rank_plan(rank, level, rounds);
        missed = missed || cost.seconds >= 0.5;
        std::printf("  %-10s rank %5lld: %8.4f s, %zu boxes of %.1f MB\n", name, static_cast<long long>(rank),
                    cost.seconds, cost.boxes, static_cast<double>(cost.bytes) * 1e-6);
      }

    std::vector<std::string> notes;
    for (std::int64_t w = 0; w < writers; ++w) notes.push_back(note_text(note_of(w, writers)));
    manifest all;
    std::string text;
    const double joined = bench::processor_seconds([&] {
      std::map<std::string, std::size_t> known;
      all.layout = "dp=128, pp=16, tp=8";
      for (const std::string& note : notes) add_share(all, known, parse_note(note));
      text = manifest_text(all);
    });
    std::size_t boxes = 0;
    for (const stored_tensor& t : all.tensors) boxes += t.boxes.size();
    const double read = bench::processor_seconds([&] { all = parse_manifest(text); });
    missed = missed || (boxes <= 2'100'000 && (joined >= 5 || read >= 5));
    std::printf(
        "the notes of %lld writers, %zu boxes, as a checked manifest of %.0f MB: %.2f s; read and checked: %.2f s "
        "(target: below 5 for 2 million boxes)\n",
        static_cast<long long>(writers), boxes, static_cast<double>(text.size()) * 1e-6, joined, read);
    return missed ? 1 : 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "checkpoint_plan: %s\n", e.what());
    return 2;
  }
}
