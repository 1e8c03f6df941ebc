#include "plan.hpp"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "llama_run.hpp"
#include "plait/plan/dry_run.hpp"
#include "strategies.hpp"

// A step runs on a device and in a world that only count: what it sends, keeps and allocates is what a real one will.
namespace {

/// The plan of one rank, with the layers of its pipeline in these stages.
template <class Precision, plait::strategy S>
run_plan plan_for(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages) {
  using specs = plait::transformer_specs<S>;
  using device_type = plait::counting_device;
  using stage_type = plait::llama<Precision, S, device_type>;
  plait::pipeline_world ranks = plait::pipeline_world::counting(s.mesh, rank);
  plait::world& w = ranks.stage();
  device_type device;
  const plait::context<device_type> ctx{device, w, plait::llama_sizes<S>(s.config, w.shape(), s.sequences, s.opt.seq),
                                        s.opt.seed};
  plait::pipeline<stage_type> model(
      ctx, ranks.along(), s.schedule, stages,
      [&](plait::stage_layers part, stage_type* first) {
        return std::make_unique<stage_type>(ctx, s.config, model_options(s), part, first);
      },
      s.parallel);
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
  model.visit([&](auto& p) {
    // What a step holds for a while, such as gathered parameters, is among what it keeps.
    const auto piece = static_cast<double>(p.piece().size()), used = static_cast<double>(p.used_size());
    const bool moves = !p.gather_plan().trivial(), cut = p.home() != nullptr && !p.home()->axes().empty();
    const bool rounded = !std::is_same_v<weight, master>, away = cut && level == plait::zero_level::parameters;
    plan.weights += (away ? (rounded ? piece : 0) : used) * sizeof(weight);
    if (moves || rounded || away) plan.weights += piece * sizeof(master);
    if (cut && level != plait::zero_level::optimizer)
      plan.gradients += piece * sizeof(gradient);
    else
      plan.gradients += (used + (moves ? piece : 0)) * sizeof(gradient);
    plan.moments += static_cast<double>(plait::moment_bytes<Precision>(
        optimizer, p.info(), p.piece().size(), (p.array_offset() + p.piece().begin) % plait::kernels::moment_block));
    plan.parameters.push_back({p.name(), plait::describe(p.stored()),
                               plait::equivalent(p.stored(), p.used()) ? "" : plait::describe(p.used())});
  });
  plait::chosen_optimizer<Precision, device_type> updates(optimizer);
  const plait::step_plan step = plait::dry_run_step(ctx, model, updates);
  plan.kept = static_cast<double>(step.kept_bytes);
  plan.traffic = step.traffic;
  return plan;
}

template <class Precision, plait::strategy Strategy>
run_plan placed_plan(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages) {
  if constexpr (has_original_order<Strategy, plait::cpu>)
    if (!s.zigzag) return plan_for<Precision, in_context<Strategy, plait::contiguous>>(s, rank, stages);
  return plan_for<Precision, in_context<Strategy, plait::zigzag>>(s, rank, stages);
}

template <class Precision>
run_plan plan_in(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages) {
  return with_strategy(s.opt, [&]<class S>() { return placed_plan<Precision, S>(s, rank, stages); });
}

}  // namespace

run_plan plan_of_rank(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages) {
  return s.opt.precision == "float"    ? plan_in<float>(s, rank, stages)
         : s.opt.precision == "double" ? plan_in<double>(s, rank, stages)
         : s.opt.precision == "bf16"   ? plan_in<plait::bf16>(s, rank, stages)
                                       : placed_plan<plait::bf16_no_masters, plait::megatron_sp>(s, rank, stages);
}

run_plan plan_of(const setup& s) {
  const std::int64_t inner = s.mesh.size() / s.mesh.extent(plait::axis_of<plait::pp>) /
                             s.mesh.extent(plait::axis_of<plait::dp>);  // ranks of cp, tp and tp_rep
  std::optional<run_plan> most;
  std::vector<run_plan::parameter> parameters;
  for (std::int64_t at = 0; at < s.mesh.extent(plait::axis_of<plait::pp>); ++at) {
    run_plan plan = plan_of_rank(s, at * inner, s.stages);
    parameters.insert(parameters.end(), plan.parameters.begin(), plan.parameters.end());
    if (!most || plan.bytes() > most->bytes()) most = std::move(plan);
  }
  most->parameters = std::move(parameters);
  return *most;
}
