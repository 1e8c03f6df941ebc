#pragma once

#include <algorithm>
#include <memory>
#include <string>
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

/// Predictions for one rank of the pipeline in a step.
template <class T, strategy S>
step_plan plan_of_stage(const scenario& s, pipeline_world& ranks, const schedule& plan,
                        const std::vector<stage_layers>& parts) {
  pipeline_world here = pipeline_world::counting(ranks.shape(), ranks.root().rank());
  counting_device device;
  const mesh_shape& mesh = here.stage().shape();
  const context<counting_device> ctx{device, here.stage(),
                                     llama_sizes<S>(s.config, mesh, s.batch / s.microbatches, s.seq), 0};
  using model_type = llama<T, S, counting_device>;
  pipeline<model_type> model(
      ctx, here.along(), plan, parts,
      [&](stage_layers part, model_type* first) {
        return std::make_unique<model_type>(ctx, s.config, s.options, part, first);
      },
      s.parallel);
  chosen_optimizer<T, counting_device> optimizer(s.optimizer);
  return dry_run_step(ctx, model, optimizer);
}

/// One rank of a pipeline. The outcome has the parameters of this rank, each by its name.
template <class T, strategy S, class Device>
pipeline_outcome train_pipeline_rank(const scenario& s, pipeline_world& ranks, Device& device, const schedule& plan) {
  using model_type = llama<T, S, Device>;
  world& stage = ranks.stage();
  const std::int64_t microbatch = s.batch / s.microbatches;
  const context<Device> ctx{device, stage, llama_sizes<S>(s.config, stage.shape(), microbatch, s.seq), 20260};
  stage_costs balance{std::vector<double>(static_cast<std::size_t>(s.config.layers), 1.0), 0.2, 0.7};
  const std::vector<stage_layers> parts = split_layers(balance, plan.shape.stages());
  pipeline<model_type> model(
      ctx, ranks.along(), plan, parts,
      [&](stage_layers part, model_type* first) {
        return std::make_unique<model_type>(ctx, s.config, s.options, part, first);
      },
      s.parallel);
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
    step.load(ctx, i * s.batch, [&](std::int64_t k, auto& ids, auto& labels, host_starts& starts) {
      fill_tokens(s, i * s.batch + k * microbatch, ids, labels);
      fill_starts(s, i * s.batch + k * microbatch, starts);
    });
    optimizer.begin_step(ctx, s.learning_rate);
    step.run(ctx);
    if (s.asks_after(i)) out.steps.push_back(step.result(ctx));
    out.measured = stage.ledger();
    if (i == 0) out.first_gradients = gather_gradients(ctx, model);
  }
  model.executor().events = nullptr;
  out.kept = most_kept(events);
  out.kept_by_schedule = peak_activations(plan, ranks.along().rank()) * plan.shape.chunks;
  if constexpr (predicted_here<T, Device>) {
    const step_plan predicted = plan_of_stage<T, S>(s, ranks, plan, parts);
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

/// A mesh of `pp` stages, each on dp x cp x tp ranks.
struct pipeline_mesh {
  std::int64_t dp = 1, pp = 1, tp = 1, cp = 1;
  std::int64_t size() const { return dp * pp * tp * cp; }
};

/// Calls `launch(ranks, body)`, which calls body(communicator, device) on `ranks` ranks.
template <class Precision, strategy S, class Launch>
void check_pipeline_on(Launch&& launch, const scenario& s, const rank_outcome& one, const pipeline_mesh& m,
                       const schedule& plan, double tolerance) {
  INFO(plan.name.str() << " dp=" << m.dp << " pp=" << m.pp << " cp=" << m.cp << " tp=" << m.tp
                       << " microbatches=" << s.microbatches);
  const tensor_extents split = split_tensor_ranks(m.tp, s.config.kv_heads);
  mesh_shape shape;
  shape.add(axis_of<dp>, m.dp);
  shape.add(axis_of<pp>, m.pp);
  shape.add(axis_of<cp>, m.cp);
  shape.add(axis_of<tp>, split.tp);
  shape.add(axis_of<tp_rep>, split.tp_rep);
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
