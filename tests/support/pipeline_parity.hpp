#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "llama_parity.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/verify.hpp"

/// Trains small Llamas on pipelines and compares every rank's share with one rank.
namespace plait::test {

struct pipeline_outcome : rank_outcome {
  int kept = 0;                 ///< most microbatches in a chunk at a time
  double kept_by_schedule = 0;  ///< the same number by the schedule
  std::int64_t parameters = 0;  ///< logical elements, each parameter once
  bool compares = false;        ///< whether the traffic is compared with a dry run
};

/// A mesh of `pp` stages, each on dp x cp x tp ranks.
struct pipeline_mesh {
  std::int64_t dp = 1, pp = 1, tp = 1, cp = 1;
  std::int64_t size() const { return dp * pp * tp * cp; }
  mesh_shape shape(std::int64_t kv_heads) const {
    const tensor_extents split = split_tensor_ranks(tp, kv_heads);
    return mesh<axis<plait::dp>, axis<plait::pp>, axis<plait::cp>, axis<plait::tp>, axis<tp_rep>>{dp, pp, cp, split.tp,
                                                                                                  split.tp_rep}
        .shape();
  }
};

/// This rank's stages of a scenario's model. The first and the last stage have fewer layers than the others.
template <class Stage, class Device>
pipeline<Stage> make_stages(const context<Device>& ctx, any_communicator along, const scenario& s,
                            const schedule& plan) {
  const stage_costs balance{std::vector<double>(static_cast<std::size_t>(s.config.layers), 1.0), 0.2, 0.7};
  const auto make = [&](stage_layers part, Stage* first) {
    return std::make_unique<Stage>(ctx, s.config, s.options, part, first);
  };
  return pipeline<Stage>(ctx, std::move(along), plan, split_layers(balance, plan.shape.stages()), make, s.parallel);
}

/// Predictions for one rank of the pipeline in a step.
template <class T, strategy S>
step_plan plan_of_stage(const scenario& s, pipeline_world& ranks, const schedule& plan) {
  pipeline_world here = pipeline_world::counting(ranks.shape(), ranks.root().rank());
  counting_device device;
  const context<counting_device> ctx{device, here.stage(), microbatch_sizes<S>(s, here.stage().shape()), 0};
  auto model = make_stages<llama<T, S, counting_device>>(ctx, here.along(), s, plan);
  chosen_optimizer<T, counting_device> optimizer(s.optimizer);
  return dry_run_step(ctx, model, optimizer);
}

/// One rank of a pipeline. The outcome has the parameters of this rank, each by its name.
template <class T, strategy S, class Device>
pipeline_outcome train_pipeline_rank(const scenario& s, pipeline_world& ranks, Device& device, const schedule& plan) {
  world& stage = ranks.stage();
  const context<Device> ctx{device, stage, microbatch_sizes<S>(s, stage.shape()), 20260};
  auto model = make_stages<llama<T, S, Device>>(ctx, ranks.along(), s, plan);
  chosen_optimizer<T, Device> optimizer(s.optimizer);
  model.visit([&](auto& p) { p.initialize(ctx); });
  pipeline_outcome out;
  out.initial = gather_values(ctx, model);
  out.initial_hash = weights_hash(ctx, model);
  training_step step(ctx, model, optimizer, s.clip);
  std::vector<pipeline_event> events;
  for (std::int64_t i = 0; i < s.steps; ++i) {
    stage.ledger().clear();
    events.clear();
    model.executor().events = &events;
    run_step(ctx, step, optimizer, s, i, s.learning_rate);
    if (s.asks_after(i)) out.steps.push_back(step.result(ctx));
    out.measured = stage.ledger();
    if (i == 0) out.first_gradients = gather_gradients(ctx, model);
  }
  model.executor().events = nullptr;
  out.kept = most_kept(events);
  out.kept_by_schedule = peak_activations(plan, ranks.along().rank()) * plan.shape.chunks;
  if constexpr (predicted_here<T, Device>) {
    const step_plan predicted = plan_of_stage<T, S>(s, ranks, plan);
    out.predicted = predicted.traffic;
    out.posted = predicted.posted;
    out.compares = true;
  }
  out.last_gradients = gather_gradients(ctx, model);
  out.weights = gather_values(ctx, model);
  model.visit([&](auto& p) {
    if (!p.counts()) return;  // another rank counts this copy
    std::int64_t n = 1;
    for (std::int64_t extent : p.info().shape) n *= extent;
    out.parameters += n;
  });
  return out;
}

/// The entries of `all` with the names of `wanted`.
inline std::vector<named_values> pick(const std::vector<named_values>& all, const std::vector<named_values>& wanted) {
  std::vector<named_values> found;
  for (const named_values& w : wanted)
    for (const named_values& a : all)
      if (a.name == w.name) found.push_back(a);
  return found;
}

/// Calls `launch(ranks, body)`, which calls body(communicator, device) on `ranks` ranks.
template <class Precision, strategy S, class Launch>
void check_pipeline_on(Launch&& launch, const scenario& s, const rank_outcome& one, const pipeline_mesh& m,
                       const schedule& plan, double tolerance) {
  INFO(plan.name.str() << " dp=" << m.dp << " pp=" << m.pp << " cp=" << m.cp << " tp=" << m.tp
                       << " microbatches=" << s.microbatches);
  const mesh_shape shape = m.shape(s.config.kv_heads);
  std::vector<pipeline_outcome> all(static_cast<std::size_t>(shape.size()));
  launch(static_cast<int>(shape.size()), [&](threads::communicator c, auto& device) {
    pipeline_world ranks(shape, any_communicator(c));
    ranks.stage().checks().set(value_check::always);
    all[static_cast<std::size_t>(c.rank())] = train_pipeline_rank<Precision, S>(s, ranks, device, plan);
  });
  std::int64_t parameters = 0, expected = 0;
  for (const named_values& p : one.initial) expected += static_cast<std::int64_t>(p.values.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    INFO("rank " << r);
    rank_outcome mine;  // one rank's results for the parameters of this rank
    mine.steps = one.steps;
    mine.initial_hash = one.initial_hash;
    mine.initial = pick(one.initial, all[r].initial);
    mine.first_gradients = pick(one.first_gradients, all[r].initial);
    mine.last_gradients = pick(one.last_gradients, all[r].initial);
    mine.weights = pick(one.weights, all[r].initial);
    check_parity(mine, all[r], tolerance);
    if (all[r].compares) CHECK(compare_ledgers(all[r].measured, all[r].predicted, true).text() == "");
    CHECK(all[r].kept == all[r].kept_by_schedule);
    if (shape.group_of(static_cast<std::int64_t>(r), axis_list(axis_of<pp>)) == 0) parameters += all[r].parameters;
  }
  CHECK(parameters == expected);  // every layer is on exactly one stage
  if (all[0].compares) check_order(all);
}

#ifndef __CUDACC__
/// The same comparison on the cpu.
template <class T, strategy S>
void check_pipeline(const scenario& s, const rank_outcome& one, const pipeline_mesh& m, const schedule& plan) {
  const auto launch = [](int ranks, auto&& body) {
    threads::run(ranks, [&](threads::communicator c) {
      cpu device;
      body(c, device);
    });
  };
  check_pipeline_on<T, S>(launch, s, one, m, plan, parity_tolerance<T>);
}
#endif

}  // namespace plait::test
