#include "plan.hpp"

#include "llama_run.hpp"

// A model on a mesh that does not run is asked, and nothing in it touched. The CPU's stands for the GPU's, too: the
// types are the same.
namespace {

template <class Precision, plait::strategy S>
run_plan plan_for(const setup& s) {
  using specs = plait::transformer_specs<S>;
  plait::world w = plait::world::planned(s.mesh);
  plait::cpu device;
  plait::context<plait::cpu> ctx{device, w, plait::llama_sizes<S>(s.config, w.shape(), s.sequences, s.opt.seq),
                                 s.opt.seed};
  plait::llama<Precision, S> model(ctx, s.config, model_options(s.opt));
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

template <class Precision>
run_plan plan_in(const setup& s) {
  const bool sp = s.opt.strategy == "sp";
  if (s.opt.store == "sharded")
    return sp ? plan_for<Precision, plait::stored_over_dp<plait::megatron_sp>>(s)
              : plan_for<Precision, plait::stored_over_dp<plait::megatron_tp>>(s);
  return sp ? plan_for<Precision, plait::megatron_sp>(s) : plan_for<Precision, plait::megatron_tp>(s);
}

}  // namespace

run_plan plan_of(const setup& s) {
  return s.opt.precision == "float"    ? plan_in<float>(s)
         : s.opt.precision == "double" ? plan_in<double>(s)
                                       : plan_in<plait::bf16>(s);
}
