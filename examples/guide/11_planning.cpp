// Predicts communication, memory and time of programs on GPUs, without GPUs. It makes a dry run of a layer. It
// estimates a step of GPT-2 (gpt2.hpp) under Megatron's strategy and under one with an axis that the program defines.
// The model needs no cost formulas. plan_llama --calibrate describes your own machine.
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "gpt2.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/plan/dry_run.hpp"
#include "plait/plan/hardware.hpp"
#include "plait/plan/program_price.hpp"
#include "plait/schedule/generators.hpp"

namespace pl = plait;

struct column : pl::axis_tag<"column"> {};

/// Both dims of a weight are sharded. Between layers `column` shards the hidden dim, and the sequence is whole over tp.
struct grid {
  using mesh = pl::mesh<pl::axis<pl::dp>, pl::axis<pl::cp>, pl::axis<column>, pl::axis<pl::tp>, pl::axis<pl::tp_rep>>;
  using residual = pl::spec<pl::shard<pl::batch, pl::dp>, pl::shard<pl::seq, pl::cp>, pl::shard<pl::hidden, column>,
                            pl::invariant<pl::tp, pl::tp_rep>>;
  using query_heads = pl::shard<pl::heads, pl::tp, pl::tp_rep>;
  using key_heads = pl::shard<pl::kv_heads, pl::tp>;
  using feed_forward = pl::shard<pl::ffn, pl::tp, pl::tp_rep>;
  using vocabulary = pl::shard<pl::vocab, pl::tp, pl::tp_rep>;
  using attention = pl::ring<pl::cp>;
};

constexpr std::int64_t samples = 4, microbatches = 16, sequence = 2048;

/// Returns the estimate of a step with `stages` stages, `replicas` data-parallel ranks, and two tensor-parallel axes.
template <pl::strategy Strategy>
pl::planner::program_price price(const pl::planner::hardware& machine, int stages, std::int64_t replicas,
                                 std::int64_t columns, std::int64_t tensor) {
  gpt2::config config;
  config.vocab = 50304, config.positions = sequence, config.hidden = 2048, config.layers = 24, config.heads = 16;
  pl::planner::program_layout layout;  // axes from the outer to the inner, as ranks are numbered
  layout.mesh.add(pl::axis_of<pl::pp>, stages), layout.mesh.add(pl::axis_of<pl::dp>, replicas);
  layout.mesh.add(pl::axis_of<pl::cp>, 1);
  if constexpr (Strategy::mesh::rank == 5) layout.mesh.add(pl::axis_of<column>, columns);
  layout.mesh.add(pl::axis_of<pl::tp>, tensor), layout.mesh.add(pl::axis_of<pl::tp_rep>, 1);
  layout.plan = pl::make_schedule<pl::one_f_one_b>(stages, microbatches);
  const pl::stage_costs even{std::vector<double>(static_cast<std::size_t>(config.layers), 1.0), 0, 0};
  layout.parts = pl::split_layers(even, stages);
  layout.how.parallel.level = pl::zero_level::optimizer;
  using stage = gpt2::model<pl::bf16, Strategy, pl::counting_device>;
  return pl::planner::price_program<stage>(
      machine, layout,
      [&](const pl::mesh_shape& mesh) {
        return gpt2::sizes<Strategy>(config, mesh, samples * mesh.extent(pl::axis_of<pl::dp>), sequence);
      },
      [&](const pl::context<pl::counting_device>& ctx, pl::stage_layers part, const stage* first) {
        return std::make_unique<stage>(ctx, config, part, first);
      });
}

/// The layer's own code runs, in a world and on a device that only count.
void show_layer(std::int64_t tensor) {
  const pl::mesh_shape mesh = pl::megatron_sp::mesh(1, 1, tensor, 1).shape();
  const pl::dim_sizes sizes = pl::sizes_of<pl::batch, pl::seq, pl::hidden, pl::ffn>(samples, sequence, 2048, 8192);
  using mlp = pl::swiglu_mlp<pl::bf16, pl::megatron_sp, pl::counting_device>;
  const pl::layer_plan plan = pl::dry_run(mesh, sizes, 0, [](const auto& ctx) { return mlp(ctx, "mlp"); });
  const auto megabytes = [](auto bytes) { return static_cast<double>(bytes) / 1e6; };
  std::printf("MLP on tp=%d: %6.1f MB on the wire forward, %6.1f backward; %6.1f MB kept, %6.1f at most in use\n",
              static_cast<int>(tensor), megabytes(plan.forward.total().wire), megabytes(plan.backward.total().wire),
              megabytes(plan.kept_bytes), megabytes(plan.peak_bytes));
}

int main() try {
  for (const std::int64_t tensor : {1, 4}) show_layer(tensor);
  const pl::planner::hardware h100 = pl::planner::hardware_called("h100", "hardware");
  const double tokens = static_cast<double>(samples * microbatches * sequence);
  const auto show = [&](const char* name, std::int64_t replicas, std::int64_t gpus,
                        const pl::planner::program_price& p) {
    std::printf("%-28s %8.1f ms a step, %5.1f in collectives, %4.1f %% bubble, %5.1f GB, %6.0f tokens/s of a GPU\n",
                name, 1e3 * p.step(), 1e3 * p.ranks[0].communication, 100 * p.bubble / p.step(),
                static_cast<double>(p.peak_bytes) / 1e9,
                tokens * static_cast<double>(replicas) / p.step() / static_cast<double>(gpus));
  };
  const auto one = price<pl::megatron_sp>(h100, 1, 8, 1, 1), cut = price<pl::megatron_sp>(h100, 1, 2, 1, 4),
             piped = price<pl::megatron_sp>(h100, 2, 2, 1, 2), squared = price<grid>(h100, 1, 2, 2, 2);
  std::printf("GPT-2 of 1.3B parameters on 8 H100:\n");
  show("dp=8", 8, 8, one);
  show("dp=2, tp=4", 2, 8, cut);
  show("pp=2, dp=2, tp=2", 2, 8, piped);
  show("dp=2, column=2, tp=2 (grid)", 2, 8, squared);
  // Succeeds if tensor-parallel ranks need less memory than single ones, the grid communicates, and dp=8 fits.
  return cut.peak_bytes < one.peak_bytes && squared.ranks[0].communication > 0 && one.fits ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "11_planning: %s\n", e.what());
  return 1;
}
