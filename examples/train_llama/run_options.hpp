#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include "options.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/types.hpp"
#include "plait/models/llama_stages.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"

// The types and options of a run's layers and optimizer, as the command line has them.

inline plait::llama_options model_options(const setup& s) {
  const options& opt = s.opt;
  return {.keep = s.recompute,
          .dropout = opt.dropout,
          .loss = {.label_smoothing = opt.label_smoothing, .z_loss = opt.z_loss},
          .attention = {.documents = keeps_documents_apart(opt), .context = s.context},
          .overlap = opt.tensor_overlap};
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

/// A strategy of the command line, with the attention policy that it names and the sequence placed as it says.
template <class Strategy, class Placement>
using in_context = plait::context_parallel<Strategy, plait::chosen<plait::cp>, Placement>;

/// Whether the program can also leave the sequence in its original order: every instantiation takes its time to
/// compile. On one context-parallel rank the orders are the same.
template <class Precision, class Strategy, class Device>
inline constexpr bool has_original_order =
    std::is_same_v<Strategy, plait::megatron_sp> && std::is_same_v<Device, plait::cpu> &&
    !std::is_same_v<plait::gradient_of<Precision>, plait::bf16>;

/// Returns the split of layers that --split measured gives, or `s.stages`. Collective.
template <class Precision, plait::strategy Strategy, plait::compute_device Device>
std::vector<plait::stage_layers> stages_of(const setup& s, plait::context<Device>& ctx, plait::any_communicator& all) {
  if (s.opt.split != "measured" || s.stages.size() == 1) return s.stages;
  plait::llama_options options = model_options(s);
  options.attention.documents = false;  // what is measured has none
  plait::llama_part_times parts = plait::measure_llama_parts<Precision, Strategy>(ctx, s.config, options);
  for (plait::action_times* part : {&parts.layer, &parts.embedding, &parts.head})
    for (double* time : {&part->forward, &part->backward, &part->input_backward, &part->weight_backward})
      *time = plait::all_reduce_scalar(ctx.device, all, *time, plait::reduce_op::max);
  return plait::split_layers(plait::stage_costs_of(parts, s.config.layers), static_cast<std::int64_t>(s.stages.size()));
}
