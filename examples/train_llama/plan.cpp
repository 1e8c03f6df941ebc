#include "plan.hpp"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llama_run.hpp"

// A model on a mesh that does not run is asked, and nothing in it touched. The CPU's stands for the GPU's, too: the
// types are the same.
namespace {

/// The plan of the rank that is first in the pipeline's stage `at`.
template <class Precision, plait::strategy S>
run_plan plan_for(const setup& s, std::int64_t at) {
  using specs = plait::transformer_specs<S>;
  using stage_type = plait::llama<Precision, S>;
  const std::int64_t inner = s.mesh.size() / s.mesh.extent(plait::axis_of<plait::pp>) /
                             s.mesh.extent(plait::axis_of<plait::dp>);  // ranks of cp, tp and tp_rep
  plait::pipeline_world ranks = plait::pipeline_world::planned(s.mesh, at * inner);
  plait::world& w = ranks.stage();
  plait::cpu device;
  plait::context<plait::cpu> ctx{device, w, plait::llama_sizes<S>(s.config, w.shape(), s.sequences, s.opt.seq),
                                 s.opt.seed};
  plait::pipeline<stage_type> model(ranks.along(), s.schedule, s.stages,
                                    [&](plait::stage_layers part, stage_type* first) {
                                      return std::make_unique<stage_type>(ctx, s.config, model_options(s), part, first);
                                    });
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

  using weight = plait::weight_of<Precision>;
  using master = plait::master_of<Precision>;
  using gradient = plait::gradient_of<Precision>;
  model.visit([&](auto& p) {
    const auto stored = static_cast<double>(p.size()), used = static_cast<double>(p.used_size());
    const bool moves = !p.gather_plan().trivial();
    plan.weights += used * sizeof(weight);
    if (moves || !std::is_same_v<weight, master>) plan.weights += stored * sizeof(master);
    plan.gradients += (used + (moves ? stored : 0)) * sizeof(gradient);
    plan.moments += 2 * stored * sizeof(master);
    plan.parameters.push_back({p.name(), plait::describe(p.stored()),
                               plait::equivalent(p.stored(), p.used()) ? "" : plait::describe(p.used())});
  });
  plan.kept = static_cast<double>(model.saved_bytes(ctx));
  const plait::adamw<Precision> optimizer;
  plan.traffic = plait::predict_step_traffic(ctx, model, optimizer, s.microbatches);
  return plan;
}

/// Of the rank that holds most; parameters of all stages.
template <class Precision, plait::strategy Strategy>
run_plan plan_under(const setup& s) {
  std::optional<run_plan> most;
  std::vector<run_plan::parameter> parameters;
  for (std::int64_t at = 0; at < s.mesh.extent(plait::axis_of<plait::pp>); ++at) {
    run_plan plan;
    if constexpr (has_text_order<Strategy, plait::cpu>)
      plan = s.zigzag ? plan_for<Precision, in_context<Strategy, plait::zigzag>>(s, at)
                      : plan_for<Precision, in_context<Strategy, plait::contiguous>>(s, at);
    else
      plan = plan_for<Precision, in_context<Strategy, plait::zigzag>>(s, at);
    parameters.insert(parameters.end(), plan.parameters.begin(), plan.parameters.end());
    if (!most || plan.bytes() > most->bytes()) most = std::move(plan);
  }
  most->parameters = std::move(parameters);
  return *most;
}

template <class Precision>
run_plan plan_in(const setup& s) {
  const bool sp = s.opt.strategy == "sp";
  if (s.opt.store == "sharded")
    return sp ? plan_under<Precision, plait::stored_over_dp<plait::megatron_sp>>(s)
              : plan_under<Precision, plait::stored_over_dp<plait::megatron_tp>>(s);
  return sp ? plan_under<Precision, plait::megatron_sp>(s) : plan_under<Precision, plait::megatron_tp>(s);
}

}  // namespace

run_plan plan_of(const setup& s) {
  return s.opt.precision == "float"    ? plan_in<float>(s)
         : s.opt.precision == "double" ? plan_in<double>(s)
                                       : plan_in<plait::bf16>(s);
}
