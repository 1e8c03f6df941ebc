// A Llama on a mesh of four axes for benchmarks: its stages on a rank of any device, and its training on the CPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/train_step.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/parse.hpp"
#include "timing.hpp"

namespace bench {

using strategy_type = plait::context_parallel<plait::megatron_sp, plait::ring<plait::cp>, plait::zigzag>;

struct case_of_run {
  std::int64_t dp_ranks, pp_ranks, cp_ranks, tp_ranks;
  const char* schedule = "1f1b";

  plait::mesh_shape shape() const {
    plait::mesh_shape mesh;
    mesh.add(plait::axis_of<plait::dp>, dp_ranks);
    mesh.add(plait::axis_of<plait::pp>, pp_ranks);
    mesh.add(plait::axis_of<plait::cp>, cp_ranks);
    mesh.add(plait::axis_of<plait::tp>, tp_ranks);
    mesh.add(plait::axis_of<plait::tp_rep>, 1);
    return mesh;
  }
};
struct sizes_of_run {
  plait::llama_config config;
  std::int64_t seq, batch, microbatches, rounds;

  /// Reads --hidden, --layers, --seq and --rounds.
  static sizes_of_run of(const numbers& given, std::int64_t batch, std::int64_t microbatches) {
    sizes_of_run s{{}, given.of("--seq", 512), batch, microbatches, given.of("--rounds", 3)};
    plait::llama_config& c = s.config;
    c.hidden = given.of("--hidden", 512);
    c.heads = c.hidden / 64, c.kv_heads = c.heads / 2, c.head_dim = 64;
    c.ffn = 3 * c.hidden;
    c.vocab = 4096;
    c.layers = given.of("--layers", 8);
    return s;
  }
};

/// The stages of one rank, on the CPU or on a device that only counts.
template <class Device>
class stages {
 public:
  using model_type = plait::llama<float, strategy_type, Device>;

  stages(Device& device, plait::pipeline_world& ranks, const case_of_run& l, const sizes_of_run& s,
         const plait::deterministic_leaves& leaves)
      : ctx{device, ranks.stage(),
            plait::llama_sizes<strategy_type>(s.config, ranks.stage().shape(), s.batch / s.microbatches, s.seq, leaves),
            1, plait::leaves_under<strategy_type>(leaves, ranks.stage().shape())},
        plan(plait::parse_schedule(l.schedule, static_cast<int>(l.pp_ranks), static_cast<int>(s.microbatches))),
        parts(plait::llama_part_flops(s.config, s.seq)),
        split(plait::split_layers(plait::stage_costs_of(parts, s.config.layers), plan.shape.stages())),
        model(
            ctx, ranks.along(), plan, split,
            [&](plait::stage_layers part, model_type* first) {
              return std::make_unique<model_type>(ctx, s.config, plait::llama_options{}, part, first);
            },
            plait::pipeline_options{.costs = plait::schedule_costs_of(parts, split)}) {}

  plait::context<Device> ctx;
  plait::schedule plan;
  plait::llama_part_times parts;
  std::vector<plait::stage_layers> split;
  plait::pipeline<model_type> model;
};

/// One rank's model and step on a device that computes. They are made once, and may run in turn with others.
template <class Device>
class trainee {
 public:
  trainee(const case_of_run& l, const sizes_of_run& s, const plait::deterministic_leaves& leaves,
          plait::threads::communicator comm)
      : sizes_(s),
        ranks_(l.shape(), plait::any_communicator(comm)),
        device_({.deterministic = static_cast<bool>(leaves)}),
        stages_(device_, ranks_, l, s, leaves),
        step_(stages_.ctx, stages_.model, optimizer_, 1.0) {
    stages_.model.visit([&](auto& p) { p.initialize(stages_.ctx); });
  }

  struct measured {
    double seconds, processor_seconds;  ///< processor seconds are of all ranks together
    std::uint64_t bytes;                ///< on the wire, in the ledgers of all ranks
  };
  measured step(std::int64_t i) {
    const auto& ctx = stages_.ctx;
    const plait::box part = plait::local_box(plait::layout_v<typename stages<Device>::model_type::tokens::spec>,
                                             ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    const plait::sequence_order places = plait::sequence_order_of<strategy_type>(ctx.ranks.shape(), ctx.sizes);
    ranks_.stage().ledger().clear();
    step_.load(ctx, i * sizes_.batch, [&](std::int64_t m, auto& ids, auto& labels) {
      const std::int64_t first = plait::first_sample_in_step(ctx.deterministic, m, sizes_.microbatches, part.global[0],
                                                             part.offset[0], part.local[0]);
      for (std::int64_t t = 0; t < ids.size(); ++t) {
        const std::int64_t sample = first + t / part.local[1], at = places.position(part.offset[1] + t % part.local[1]);
        ids.data()[t] = (at * 31 + sample * 7) % sizes_.config.vocab;
        labels.data()[t] = (at * 17 + sample) % sizes_.config.vocab;
      }
    });
    optimizer_.begin_step(ctx, 1e-3);
    ranks_.root().barrier();
    double used = 0;
    const double took = seconds([&] {
      used = processor_seconds([&] { step_.run(ctx); });
      ranks_.root().barrier();
    });
    auto bytes = static_cast<std::int64_t>(ranks_.stage().ledger().total().wire);
    ranks_.root().all_reduce(&used, &used, 1, plait::dtype::f64, plait::reduce_op::sum);
    ranks_.root().all_reduce(&bytes, &bytes, 1, plait::dtype::i64, plait::reduce_op::sum);
    return {took, used, static_cast<std::uint64_t>(bytes)};
  }
  std::uint64_t hash() { return plait::weights_hash(stages_.ctx, stages_.model); }

 private:
  const sizes_of_run& sizes_;
  plait::pipeline_world ranks_;
  Device device_;
  stages<Device> stages_;
  plait::adamw<float> optimizer_;
  plait::training_step<typename stages<Device>::model_type> step_;
};

}  // namespace bench
