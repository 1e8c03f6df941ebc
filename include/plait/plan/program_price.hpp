// Prices a user's own model on any mesh. Its own passes run without computation, and the issued work is priced with the
// description of a machine. See examples/guide/11_planning.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/plan/dry_run.hpp"
#include "plait/plan/machine_time.hpp"
#include "plait/schedule/simulate.hpp"

namespace plait::planner {

/// The work of one pipeline rank in a step, measured by a dry run.
struct rank_price {
  computed_seconds passes;      ///< of all microbatches
  double communication = 0;     ///< seconds of collectives within passes, of all microbatches
  double optimizer = 0;         ///< seconds of the norm, the update and all other work outside of passes
  double data = 0;              ///< seconds of collectives outside of passes, before overlap
  double exposed = 0;           ///< part of `data` that nothing hides
  ledger traffic;               ///< of a whole step
  std::int64_t peak_bytes = 0;  ///< the most in use at a time, in total
};

/// The price of a step of a program.
struct program_price {
  std::vector<rank_price> ranks;  ///< of the pipeline
  double pipeline = 0;            ///< seconds of all passes by the schedule
  double bubble = 0;              ///< part of `pipeline` in which the busiest rank idles
  double exposed = 0, optimizer = 0, straggling = 0;
  double turns = 0;  ///< seconds of waits for cores that other ranks use
  std::int64_t peak_bytes = 0;
  bool fits = false;  ///< whether the memory suffices, with reserved and wasted memory

  double step() const { return pipeline + exposed + optimizer + straggling + turns; }
};

namespace detail {

/// Returns the place of the group of `rank` along the axes in `label`, joined by '+' as in the rows of `ledger`.
/// `label` may also be the name of the pipeline's two ends.
inline group_place place_labelled(const hardware& h, const mesh_shape& mesh, std::int64_t rank,
                                  std::string_view label) {
  const bool ends = label == plait::detail::ends_axis;
  if (ends) label = axis_of<pp>.text();
  axis_list axes;
  while (!label.empty()) {
    const std::size_t plus = std::min(label.find('+'), label.size());
    for (const axis_id& axis : mesh.axes)
      if (axis.text() == label.substr(0, plus)) axes.push_back(axis);
    label.remove_prefix(std::min(plus + 1, label.size()));
  }
  group_place g;
  const std::int64_t last = mesh.size(axes) - 1;
  g.size = ends ? std::min<std::int64_t>(2, last + 1) : last + 1;
  g.levels = h.levels.size();
  const std::int64_t mine = mesh.group_of(rank, axes);
  const auto is_there = [&](std::int64_t r) {
    if (mesh.group_of(r, axes) != mine) return false;
    const std::int64_t place = ends ? mesh.coordinate(r, axis_of<pp>) : 0;
    return place == 0 || place == last;
  };
  for (std::int64_t r = 0; r < mesh.size(); ++r)
    if (is_there(r))
      for (std::size_t i = 0; i < g.levels; ++i)
        g.together[i] += h.levels[i].ranks == 0 || r / h.levels[i].ranks == rank / h.levels[i].ranks;
  return g;
}

/// Returns the seconds of the calls that `after` counts in addition to `before`; calls of one kind in one group are
/// equal. Messages of the pipeline are not included, because the schedule has them.
inline double ledger_seconds(const hardware& h, const mesh_shape& mesh, std::int64_t rank, const ledger& after,
                             const ledger& before) {
  double sum = 0;
  for (const ledger::row& row : after.rows) {
    const group_place group = place_labelled(h, mesh, rank, row.label);
    for (int k = 0; k < collective_kinds; ++k) {
      const auto kind = static_cast<collective>(k);
      const bool message = kind == collective::receive && row.label == axis_of<pp>.text();
      if (kind == collective::send || message || group.size <= 1) continue;
      const ledger::entry now = row.kinds[static_cast<std::size_t>(k)], then = before.total(row.label, kind);
      if (now.calls <= then.calls) continue;
      const auto calls = static_cast<double>(now.calls - then.calls);
      const double whole = kind == collective::all_gather ? static_cast<double>(group.size) : 1;
      const double bytes = whole * static_cast<double>(now.payload - then.payload) / calls;
      sum += calls * collective_seconds(h, group, kind, bytes);
    }
  }
  return sum;
}

/// One pass of a stage: its computation and its collectives.
struct metered_pass {
  computed_seconds computed;
  double communication = 0;

  double total() const { return computed.total() + communication; }
};

/// The passes of one microbatch of a stage.
struct metered_stage {
  metered_pass forward, input, weight;
};

/// Runs the passes of a stage on the counting device. `meter(work)` runs `work` and returns its `metered_pass`.
template <class Stage, class Meter>
metered_stage meter_stage(const context<counting_device>& ctx, Stage& stage, Meter&& meter) {
  const typename Stage::tokens ids(ctx), labels(ctx);
  const auto seed = Stage::mean::seed_type::weighted(ctx, 0.0);
  metered_stage out;
  weight_work later;
  microbatch<counting_device> mb(ctx);
  mb.deferred = &later;
  typename Stage::saved kept;
  out.forward = meter([&] {
    typename Stage::activation x;
    if (!stage.part().first) x = typename Stage::activation(ctx);
    x = stage.forward_layers(mb, ids, std::move(x), &kept);
    if (stage.part().last) plait::detail::forward_loss_of_step(stage, mb, std::move(x), labels, kept, [](auto&&) {});
  });
  out.input = meter([&] {
    typename Stage::gradient dy;
    if (stage.part().last)
      dy = plait::detail::backward_loss_of_step(stage, mb, labels, kept, seed, [](auto&&) {});
    else
      dy = typename Stage::gradient(ctx);
    dy = stage.backward_layers(mb, ids, kept, std::move(dy));
  });
  out.weight = meter([&] { later.run(); });
  return out;
}

}  // namespace detail

/// A program's model on a mesh. The axes of `mesh`, with or without pp, are ordered from the outside to the inside, as
/// ranks are numbered. `plan` is the schedule, and `parts` are the layers of its stages.
struct program_layout {
  mesh_shape mesh;
  schedule plan;
  std::vector<stage_layers> parts;
  pipeline_options how{};
  bool overlaps_data = true;  ///< whether collectives of data parallelism overlap passes
};

namespace detail {

/// Seconds of one microbatch's passes on one rank.
struct passes_of_rank {
  double one = 0;
  double layers = 0;  ///< number of layers of its stages
};

/// Measures the passes of a rank's stages, without a step that moves parameters and gradients. Adds them to `r`, and
/// returns the costs of the stages in an argument.
template <model Stage, class Meter, class Make>
passes_of_rank price_passes(const context<counting_device>& ctx, const program_layout& l, int place, Meter&& meter,
                            Make&& make, rank_price& r, schedule_costs& costs) {
  passes_of_rank out;
  if (static_cast<int>(l.parts.size()) != l.plan.shape.stages()) return out;  // a pipeline refuses these
  const auto rounds = static_cast<double>(l.plan.shape.microbatches);
  std::vector<std::unique_ptr<Stage>> alone;
  for (int c = 0; c < l.plan.shape.chunks; ++c) {
    const auto at = static_cast<std::size_t>(l.plan.shape.stage_of(place, c));
    alone.push_back(make(ctx, l.parts[at], c > 0 && alone[0]->part().first ? alone[0].get() : nullptr));
  }
  for (const auto& stage : alone) {
    gather_parameters(ctx, *stage);
    zero_gradients(ctx, *stage);
  }
  for (std::size_t c = 0; c < alone.size(); ++c) {
    Stage& stage = *alone[c];
    meter_stage(ctx, stage, meter);  // allocates everything that is allocated once
    metered_stage m;
    r.communication += rounds * meter([&] { m = meter_stage(ctx, stage, meter); }).communication;
    for (const metered_pass* p : {&m.forward, &m.input, &m.weight}) {
      r.passes += rounds * p->computed;
      out.one += p->total();
    }
    out.layers += static_cast<double>(stage.part().size());
    const int at = l.plan.shape.stage_of(place, static_cast<int>(c));
    costs.stages[static_cast<std::size_t>(at)] = {m.forward.total(), m.input.total() + m.weight.total(),
                                                  m.input.total(), m.weight.total()};
  }
  return out;
}

/// Returns the seconds of data-parallel communication that no pass hides. Nothing hides the last reduction and the
/// first gather of a step. If each microbatch gathers parameters, its passes hide its part.
inline double exposed_seconds(const hardware& h, const program_layout& l, const rank_price& r,
                              const passes_of_rank& passes) {
  if (!l.overlaps_data) return r.data;
  const bool each = l.how.parallel.level == zero_level::parameters;
  const double times = each ? static_cast<double>(l.plan.shape.microbatches) : 1, part = r.data / times;
  return times * std::max(part - h.data_hidden * passes.one, part / std::max(passes.layers, 1.0));
}

/// Adds the waits of a step to the passes of its busiest rank. `costs` are the pipeline's costs. `busiest` and `busy`
/// are the seconds of computation of the busiest rank and of all ranks of one pipeline.
inline void add_waits(program_price& out, const hardware& h, const program_layout& l, const schedule_costs& costs,
                      double busiest, double busy) {
  const std::int64_t places = l.mesh.size(axis_list{axis_of<pp>});
  out.pipeline = places > 1 ? simulate(l.plan, costs).makespan : busiest;
  out.bubble = out.pipeline - busiest;
  const std::int64_t unit = h.levels.front().ranks == 0 ? 1 : h.levels.front().ranks;
  const double units = std::max(1.0, static_cast<double>(l.mesh.size()) / static_cast<double>(unit));
  out.straggling = h.straggling * std::log2(units) * out.step();
  if (h.cores <= 0 || l.mesh.size() <= h.cores) return;
  const double pipelines = static_cast<double>(l.mesh.size() / places);
  double waits = 0;  // for a core, per message for which a pass waits
  if (places > 1) {
    schedule_costs in_turn = costs;
    in_turn.link += h.turn;
    waits = simulate(l.plan, in_turn).makespan - out.pipeline;
  }
  out.turns = std::max(0.0, pipelines * busy / static_cast<double>(h.cores) + waits - out.step());
}

}  // namespace detail

/// Returns the price of a training step with AdamW, for a model whose stages are `Stage` on the `counting_device`.
/// `sizes(mesh)` returns the dims' sizes on the mesh of a stage, which has no pp. `make(ctx, part, first)` makes a
/// stage as `std::unique_ptr<Stage>`, as for `pipeline`. The call takes some milliseconds, the time of the layers' code
/// without kernels. Throws the errors of the model and the mesh. Throws also for numbers that the machine cannot
/// multiply, and for offloaded activations.
template <model Stage, class Sizes, class Make>
program_price price_program(const hardware& h, const program_layout& l, Sizes&& sizes, Make&& make) {
  if (l.how.offload_activations)
    fail("price_program: copies of offloaded activations have no price; legal is offload_activations = 0");
  program_price out;
  const std::int64_t places = l.mesh.size(axis_list{axis_of<pp>});
  const auto rounds = static_cast<double>(l.plan.shape.microbatches);
  schedule_costs costs;
  costs.stages.resize(static_cast<std::size_t>(l.plan.shape.stages()));
  double busiest = 0, busy = 0;
  std::int64_t stride = 1;  // ranks between adjacent places on the pipeline
  for (std::size_t i = l.mesh.axes.size(); i-- > 0 && !(l.mesh.axes[i] == axis_of<pp>);) stride *= l.mesh.extents[i];
  for (std::int64_t place = 0; place < places; ++place) {
    const std::int64_t rank = places > 1 ? place * stride : 0;
    pipeline_world world_of = pipeline_world::counting(l.mesh, rank);
    counting_device device;
    const context<counting_device> ctx{device, world_of.stage(), sizes(world_of.stage().shape()), 1};
    rank_price& r = out.ranks.emplace_back();
    work_clock clock(h);
    device.report_to(&clock);
    ledger& book = ctx.ranks.ledger();
    const auto meter = [&](auto&& work) {
      const computed_seconds before = clock.now();
      const ledger sent = book;
      work();
      return detail::metered_pass{clock.now() - before, detail::ledger_seconds(h, l.mesh, rank, book, sent)};
    };
    const detail::passes_of_rank passes =
        detail::price_passes<Stage>(ctx, l, static_cast<int>(place), meter, make, r, costs);
    pipeline<Stage> stages(
        ctx, world_of.along(), l.plan, l.parts, [&](stage_layers part, Stage* first) { return make(ctx, part, first); },
        l.how);
    const computed_seconds before = clock.now();
    const step_plan step = dry_run_step(ctx, stages);  // the second of two steps
    r.traffic = step.traffic;
    r.peak_bytes = step.peak_bytes;
    r.optimizer = std::max(0.0, (clock.now() - before).total() / 2 - r.passes.total());
    r.data = std::max(0.0, detail::ledger_seconds(h, l.mesh, rank, step.traffic, {}) - r.communication);
    r.exposed = detail::exposed_seconds(h, l, r, passes);
    busiest = std::max(busiest, rounds * passes.one);
    busy += rounds * passes.one + r.data + r.optimizer;
    out.peak_bytes = std::max(out.peak_bytes, r.peak_bytes);
    out.exposed = std::max(out.exposed, r.exposed);
    out.optimizer = std::max(out.optimizer, r.optimizer);
    const ledger::entry messages = step.traffic.total(axis_of<pp>.text(), collective::send);
    if (places > 1 && messages.calls > 0)
      costs.link = std::max(
          costs.link, message_seconds(h, {places, stride},
                                      static_cast<double>(messages.payload) / static_cast<double>(messages.calls)));
  }
  detail::add_waits(out, h, l, costs, busiest, busy);
  const auto bytes = static_cast<double>(out.peak_bytes);
  out.fits = bytes * (1 + h.fragmentation) + h.reserved <= h.memory;
  return out;
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
