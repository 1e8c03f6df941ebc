// The model and the sizes of a run of bench_deterministic, and the bytes that a step should send.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/parse.hpp"

namespace bench {

using strategy_type = plait::context_parallel<plait::megatron_sp, plait::ring<plait::cp>, plait::zigzag>;

struct case_of_run {
  std::int64_t dp_ranks, pp_ranks, cp_ranks, tp_ranks;
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
        plan(plait::parse_schedule("1f1b", static_cast<int>(l.pp_ranks), static_cast<int>(s.microbatches))),
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

/// Returns the bytes on the wire in the ledgers of all ranks after a step, from a dry run of each rank.
std::uint64_t predicted_bytes(const case_of_run& l, const sizes_of_run& s, const plait::deterministic_leaves& leaves);

}  // namespace bench
