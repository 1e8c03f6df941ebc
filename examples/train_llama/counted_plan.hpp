// A rank's plan from a dry run: a step on a device and in a world that only count, so what it sends, keeps and
// allocates is what a real one will. The build instantiates it in a file for each precision and strategy; plan.cpp
// chooses.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "plait/checkpoint/held_state.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/plan/dry_run.hpp"
#include "plan.hpp"
#include "run_options.hpp"

/// The stages of one rank, with the layers of its pipeline in `parts`, where everything is only counted.
template <class Precision, plait::strategy S>
struct counted_stages {
  using precision = Precision;
  using specs = plait::transformer_specs<S>;
  using device_type = plait::counting_device;
  using stage_type = plait::llama<Precision, S, device_type>;

  counted_stages(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& parts,
                 const plait::llama_options& options, const plait::pipeline_options& how)
      : ranks(plait::pipeline_world::counting(s.mesh, rank)),
        device(offloads(s.opt)),
        ctx{device, ranks.stage(),
            plait::llama_sizes<S>(s.config, ranks.stage().shape(), s.sequences, s.opt.seq, s.deterministic), s.opt.seed,
            plait::leaves_under<S>(s.deterministic, ranks.stage().shape())},
        model(
            ctx, ranks.along(), s.schedule, parts,
            [&](plait::stage_layers part, stage_type* first) {
              return std::make_unique<stage_type>(ctx, s.config, options, part, first);
            },
            how) {}

  plait::pipeline_world ranks;
  device_type device;
  plait::context<device_type> ctx;
  plait::pipeline<stage_type> model;
};

template <class Counted>
run_plan plan_for(const setup& s, Counted& counted) {
  using Precision = typename Counted::precision;
  using specs = typename Counted::specs;
  plait::world& w = counted.ranks.stage();
  const auto& ctx = counted.ctx;
  auto& model = counted.model;
  run_plan plan;
  const auto show = [&](const char* name, const plait::layout& a) {
    plan.activations.push_back({name, plait::describe(a),
                                static_cast<double>(plait::local_elements(a, w.shape(), ctx.sizes)) *
                                    sizeof(plait::activation_of<Precision>)});
  };
  show("residual", plait::layout_v<typename specs::residual>);
  show("queries", plait::layout_v<typename specs::queries>);
  show("keys", plait::layout_v<typename specs::keys>);
  show("ffn", plait::layout_v<typename specs::wide>);
  show("logits", plait::layout_v<typename specs::logits>);

  const plait::zero_level level = s.parallel.parallel.level;
  using weight = plait::weight_of<Precision>;
  using master = plait::master_of<Precision>;
  using gradient = plait::gradient_of<Precision>;
  const plait::optimizer_options optimizer = optimizer_options_of(s.opt);
  double& optimizers = offloads(s.opt) ? plan.on_host : plan.optimizer;
  model.visit([&](auto& p) {
    // What a step holds for a while, such as gathered parameters, is among what it keeps.
    const auto piece = static_cast<double>(p.slice().size()), used = static_cast<double>(p.used_size());
    const bool moves = !p.gather_plan().trivial(), cut = p.storage() != nullptr && !p.storage()->axes().empty();
    const bool rounded = !std::is_same_v<weight, master>, away = cut && level == plait::zero_level::parameters;
    plan.weights += (away ? (rounded ? piece : 0) : used) * sizeof(weight);
    if (rounded)
      optimizers += piece * sizeof(master);
    else if (moves || away)
      plan.weights += piece * sizeof(master);
    if (cut && level != plait::zero_level::optimizer)
      plan.gradients += piece * sizeof(gradient);
    else
      plan.gradients += (used + (moves ? piece : 0)) * sizeof(gradient);
    optimizers += static_cast<double>(plait::moment_bytes<Precision>(
        optimizer, p.info(), p.slice().size(), (p.array_offset() + p.slice().begin) % plait::kernels::moment_block));
    plan.parameters.push_back({p.name(), plait::describe(p.stored()),
                               plait::equivalent(p.stored(), p.used()) ? "" : plait::describe(p.used())});
  });
  plait::chosen_optimizer<Precision, plait::counting_device> updates(optimizer);
  const plait::step_plan step = plait::dry_run_step(ctx, model, updates);
  plan.kept = static_cast<double>(step.kept_bytes);
  if (s.cudnn && s.opt.attention_sums == "fixed")
    plan.attention = static_cast<double>(ctx.device.fixed_order_attention_bytes());
  plan.traffic = step.traffic;
  plan.posted = step.posted;
  if (!s.opt.checkpoint_dir.empty()) {
    std::vector<plait::held_tensor> held = plait::held_weights(ctx, model);
    for (plait::held_tensor& h : plait::held_optimizer(ctx, model, updates)) held.push_back(std::move(h));
    plan.saved = static_cast<double>(plait::plan_share(ctx, held).bytes);
  }
  return plan;
}

/// What a saved step has of a rank's stages, whose optimizer has made no step.
template <class Counted>
std::vector<plait::safetensors_declaration> state_of(const setup& s, Counted& counted) {
  plait::chosen_optimizer<typename Counted::precision, plait::counting_device> updates(optimizer_options_of(s.opt));
  std::vector<plait::held_tensor> held = plait::held_weights(counted.ctx, counted.model);
  for (plait::held_tensor& h : plait::held_optimizer(counted.ctx, counted.model, updates)) held.push_back(std::move(h));
  std::vector<plait::safetensors_declaration> state;
  for (const plait::held_tensor& h : held)
    if (h.counts) state.push_back({h.name, plait::safetensors_dtype_of(h.type), h.shape});
  return state;
}

/// Calls f(counted_stages&) for those of one rank.
template <class Precision, plait::strategy S, class F>
auto with_counted(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& parts,
                  const plait::llama_options& options, const plait::pipeline_options& how, F&& f) {
  const auto run = [&]<class Placed>() {
    counted_stages<Precision, Placed> counted(s, rank, parts, options, how);
    return f(counted);
  };
  if constexpr (has_original_order<Precision, S, plait::cpu>)
    if (!s.zigzag) return run.template operator()<in_context<S, plait::contiguous>>();
  return run.template operator()<in_context<S, plait::zigzag>>();
}

template <class Precision, plait::strategy S>
run_plan plan_as(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages) {
  run_plan plan = with_counted<Precision, S>(s, rank, stages, model_options(s), s.parallel,
                                             [&](auto& counted) { return plan_for(s, counted); });
  if (s.opt.resume != "none" || !s.first_step.empty())  // with everything whole, as a data rank has not all parts
    plan.state = with_counted<Precision, S>(s, rank, stages, model_options(s), {},
                                            [&](auto& counted) { return state_of(s, counted); });
  return plan;
}

template <class Precision, plait::strategy S>
plait::recompute_fit fit_as(const setup& s, int at, std::int64_t rank, std::int64_t budget) {
  // What layers keep depends neither on where parameters lie nor on documents.
  plait::llama_options options = model_options(s);
  options.attention.documents = false;
  return with_counted<Precision, S>(s, rank, s.stages, options, {}, [&](auto& counted) {
    plait::gather_parameters(counted.ctx, counted.model);
    plait::zero_gradients(counted.ctx, counted.model);
    return plait::fit_recompute(counted.ctx, counted.model.stages(), s.schedule, at, budget);
  });
}
