// The plan of a rank for one precision and strategy, from a dry run that only counts.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "options.hpp"
#include "plait/checkpoint/held_state.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/types.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/nn/linear/lora.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/plan/dry_run.hpp"
#include "plan.hpp"

// The types and options of a run's layers and optimizer, as the command line has them.

inline plait::llama_options model_options(const setup& s) {
  const options& opt = s.opt;
  const plait::lora_options adapter{.rank = opt.lora,
                                    .scale = opt.lora > 0 ? opt.lora_alpha / static_cast<double>(opt.lora) : 1};
  const plait::mlp_lora three{.gate = adapter, .up = adapter, .down = adapter};
  const plait::balance_over over = opt.balance_over == "step"         ? plait::balance_over::step
                                   : opt.balance_over == "microbatch" ? plait::balance_over::microbatch
                                                                      : plait::balance_over::sequence;
  return {.keep = s.recompute,
          .dropout = opt.dropout,
          .loss = {.label_smoothing = opt.label_smoothing, .z_loss = opt.z_loss},
          .loss_chunks = opt.loss_chunks,
          .attention = {.documents = keeps_documents_apart(opt),
                        .context = s.context,
                        .lora = {.q = adapter, .k = adapter, .v = adapter, .o = adapter}},
          .mlp = opt.lora_linears != "attention" ? three : plait::mlp_lora{},
          .experts = opt.mixture && opt.lora_linears == "all" ? three : plait::mlp_lora{},
          .mixture_losses = {.balance = {opt.balance_loss, over}, .z_loss = opt.router_z_loss},
          .expert_limit = opt.expert_limit,
          .padded_experts = opt.expert_rows == "padded",
          .expert_bias_rate = opt.expert_bias_rate,
          .overlap = opt.tensor_overlap};
}

/// The global sizes of all dims of a run's tensors, on the mesh of one stage.
template <plait::strategy S>
plait::dim_sizes sizes_of(const setup& s, const plait::mesh_shape& mesh) {
  return plait::llama_sizes<S>(s.config, mesh, s.sequences, s.opt.seq, s.deterministic);
}

/// Makes a stage of the run's model. With --lora only adapters are trained. This is set here, because data parallelism
/// places trained and frozen parameters differently.
template <class Stage, plait::compute_device Device>
std::unique_ptr<Stage> make_stage(const plait::context<Device>& ctx, const setup& s,
                                  const plait::llama_options& options, plait::stage_layers part, Stage* first) {
  auto stage = std::make_unique<Stage>(ctx, s.config, options, part, first);
  if (s.opt.lora > 0) plait::freeze_all_but_adapters(*stage);
  return stage;
}

inline plait::optimizer_options optimizer_options_of(const options& opt) {
  const plait::moment_type moments = opt.moments == "bf16"   ? plait::moment_type::bf16
                                     : opt.moments == "int8" ? plait::moment_type::int8
                                                             : plait::moment_type::full;
  const plait::adamw_options adamw{.weight_decay = opt.weight_decay, .moments = moments};
  if (opt.optimizer == "adamw") return adamw;
  return plait::muon_options{
      .momentum = opt.muon_momentum,
      .scale = opt.muon_scale == "original" ? plait::muon_scale::original : plait::muon_scale::match_rms_adamw,
      .learning_rate_ratio = opt.muon_lr_ratio,
      .weight_decay = opt.weight_decay,
      .adamw = adamw};
}

/// A strategy with the attention policy and the order of the sequence that the command line names.
template <class Strategy, class Placement>
using in_context = plait::context_parallel<Strategy, plait::chosen<plait::cp>, Placement>;

/// The model of a strategy, with experts if the strategy shards them.
template <class Precision, class Strategy, class Device>
struct model_of {
  using type = plait::llama<Precision, Strategy, Device>;
};
template <class Precision, plait::mixture_strategy Strategy, class Device>
struct model_of<Precision, Strategy, Device> {
  using type = plait::mixture_llama<Precision, Strategy, Device>;
};

/// Whether the program is also built for sequences in original order. Not all types are, because instantiations take
/// long to compile. On one context-parallel rank the orders are the same.
template <class Precision, class Strategy, class Device>
inline constexpr bool has_original_order =
    std::is_same_v<Strategy, plait::megatron_sp> && std::is_same_v<Device, plait::cpu> &&
    !std::is_same_v<plait::gradient_of<Precision>, plait::bf16>;

/// Calls f.operator()<Placed>() with the strategy that has the order of the sequence of --attention.
template <class Precision, class Strategy, class Device, class F>
auto in_order(const setup& s, F&& f) {
  if constexpr (has_original_order<Precision, Strategy, Device>)
    if (!s.zigzag) return f.template operator()<in_context<Strategy, plait::contiguous>>();
  return f.template operator()<in_context<Strategy, plait::zigzag>>();
}

/// Returns the split of layers by measured times with --split measured; otherwise `s.stages`. Collective.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
std::vector<plait::stage_layers> stages_of(const setup& s, plait::context<Device>& ctx, plait::any_communicator& all) {
  if (s.opt.split != "measured" || s.stages.size() == 1) return s.stages;
  plait::llama_options options = model_options(s);
  options.attention.documents = false;  // the measured data have no documents
  plait::llama_part_times parts =
      plait::measure_llama_parts<typename model_of<Precision, Strategy, Device>::type>(ctx, s.config, options);
  for (plait::action_times* part : {&parts.layer, &parts.embedding, &parts.head})
    for (double* time : {&part->forward, &part->backward, &part->input_backward, &part->weight_backward})
      *time = plait::all_reduce_scalar(ctx.device, all, *time, plait::reduce_op::max);
  return plait::split_layers(plait::stage_costs_of(parts, s.config.layers), static_cast<std::int64_t>(s.stages.size()));
}

/// The stages of one rank on a device that only counts. `parts` are the layers of the pipeline's stages.
template <class Precision, plait::strategy S>
struct counted_stages {
  using precision = Precision;
  using specs = plait::transformer_specs<S>;
  using device_type = plait::counting_device;
  using stage_type = typename model_of<Precision, S, device_type>::type;

  counted_stages(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& parts,
                 const plait::llama_options& options, const plait::pipeline_options& how)
      : ranks(plait::pipeline_world::counting(
            s.mesh, rank, plait::axis_of<plait::pp>,
            s.opt.backend == "nccl" ? plait::nccl::takes_unequal_parts : plait::unequal_parts_rule())),
        device(offloads_optimizer(s.opt)),
        ctx{device, ranks.stage(), sizes_of<S>(s, ranks.stage().shape()), static_cast<std::uint64_t>(s.opt.seed),
            plait::leaves_under<S>(s.deterministic, ranks.stage().shape())},
        model(
            ctx, ranks.along(), s.schedule, parts,
            [&](plait::stage_layers part, stage_type* first) { return make_stage(ctx, s, options, part, first); },
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
                                static_cast<double>(plait::local_box(a, w.shape(), ctx.sizes, w.rank()).local_size()) *
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
  double& optimizers = offloads_optimizer(s.opt) ? plan.on_host : plan.optimizer;
  model.visit([&](auto& p) {
    // Memory that a step holds for a time, such as gathered parameters, counts as kept.
    const auto piece = static_cast<double>(p.slice().size()), used = static_cast<double>(p.used_size());
    const bool moves = !p.gather_plan().trivial(), cut = p.storage() != nullptr && !p.storage()->axes().empty();
    const bool rounded = !std::is_same_v<weight, master>, away = cut && level == plait::zero_level::parameters;
    plan.weights += (away ? (rounded ? piece : 0) : used) * sizeof(weight);
    if (rounded)
      optimizers += piece * sizeof(master);
    else if (moves || away)
      plan.weights += piece * sizeof(master);
    if (p.trainable()) {
      plan.trained += plait::elements_of_shape(p.info().shape);
      if (cut && level != plait::zero_level::optimizer)
        plan.gradients += piece * sizeof(gradient);
      else
        plan.gradients += (used + (moves ? piece : 0)) * sizeof(gradient);
      optimizers += static_cast<double>(plait::moment_bytes<Precision>(
          optimizer, p.info(), p.slice().size(), (p.array_offset() + p.slice().begin) % plait::kernels::moment_block));
    }
    plan.parameters.push_back({p.name(), plait::describe(p.stored()),
                               plait::equivalent(p.stored(), p.used()) ? "" : plait::describe(p.used())});
  });
  plait::chosen_optimizer<Precision, plait::counting_device> updates(optimizer);
  const plait::step_plan step = plait::dry_run_step(ctx, model, updates);
  plan.kept = static_cast<double>(step.kept_bytes);
  // In a step the host also holds activations, in addition to the optimizer's state.
  plan.on_host += static_cast<double>(step.host_bytes) - static_cast<double>(ctx.device.host_bytes_in_use());
  if (s.cudnn && s.opt.attention_sums == "fixed")
    plan.attention = static_cast<double>(ctx.device.fixed_order_attention_bytes());
  plan.peak = static_cast<double>(step.peak_bytes) + plan.attention;
  plan.traffic = step.traffic;
  plan.posted = step.posted;
  if (!s.opt.checkpoint_dir.empty()) {
    std::vector<plait::held_tensor> held = plait::held_state(ctx, model, updates);
    plan.saved = static_cast<double>(plait::plan_share(ctx, held).bytes);
  }
  return plan;
}

/// Returns the tensors that a saved step has of a rank's stages, before the optimizer's first step.
template <class Counted>
std::vector<plait::safetensors_declaration> state_of(const setup& s, Counted& counted) {
  plait::chosen_optimizer<typename Counted::precision, plait::counting_device> updates(optimizer_options_of(s.opt));
  std::vector<plait::safetensors_declaration> state;
  for (const plait::held_tensor& h : plait::held_state(counted.ctx, counted.model, updates))
    if (h.counts) state.push_back({h.name, plait::safetensors_dtype_of(h.type), h.shape});
  return state;
}

/// Calls f with the `counted_stages` of one rank.
template <class Precision, plait::strategy S, class F>
auto with_counted(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& parts,
                  const plait::llama_options& options, const plait::pipeline_options& how, F&& f) {
  return in_order<Precision, S, plait::cpu>(s, [&]<class Placed>() {
    counted_stages<Precision, Placed> counted(s, rank, parts, options, how);
    return f(counted);
  });
}

template <class Precision, plait::strategy S>
run_plan plan_as(const setup& s, std::int64_t rank, const std::vector<plait::stage_layers>& stages) {
  run_plan plan = with_counted<Precision, S>(s, rank, stages, model_options(s), s.parallel,
                                             [&](auto& counted) { return plan_for(s, counted); });
  if (s.opt.resume != "none" || !s.first_step.empty())  // with whole parameters: one data rank may lack some parts
    plan.state = with_counted<Precision, S>(s, rank, stages, model_options(s), {},
                                            [&](auto& counted) { return state_of(s, counted); });
  return plan;
}

template <class Precision, plait::strategy S>
plait::recompute_fit fit_as(const setup& s, int at, std::int64_t rank, std::int64_t budget) {
  // The bytes that layers keep depend neither on the placement of parameters nor on documents. Without data parallelism
  // the gradients of all parameters have their own memory, outside a step.
  plait::llama_options options = model_options(s);
  options.attention.documents = false;
  return with_counted<Precision, S>(s, rank, s.stages, options, {.axes = {.shard = {}}}, [&](auto& counted) {
    plait::gather_parameters(counted.ctx, counted.model);
    plait::zero_gradients(counted.ctx, counted.model);
    return plait::fit_recompute(counted.ctx, counted.model.stages(), s.schedule, at, budget);
  });
}
