// The price of a layout: the time of a training step and the memory of its fullest rank, by formulas that take
// microseconds. The exact schedule is simulated in plan/simulated_step.hpp. Next: plan/search.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "plait/core/macros_off.hpp"
#include "plait/plan/memory.hpp"

namespace plait::planner {

/// Where the seconds of a step go, on the busiest rank. Communication counts where nothing hides it.
struct step_split {
  double products = 0, attention = 0, memory = 0;  ///< computing, with what is recomputed
  double recompute = 0;                            ///< of these: what is computed a second time
  double tensor = 0, context = 0;                  ///< communication of tp and cp
  double experts = 0;                              ///< tokens on their way to experts and back
  double bubble = 0;                               ///< idle for want of work in the pipeline, messages included
  double data = 0;                                 ///< communication over dp (and cp) of gradients and parameters
  double optimizer = 0;
  double straggling = 0;
  double turns = 0;  ///< waiting for cores that other ranks use, where ranks share them

  constexpr double computing() const { return products + attention + memory; }
  constexpr double total() const {
    return computing() + tensor + context + experts + bubble + data + optimizer + straggling + turns;
  }
};

/// A layout with its price.
struct layout_price {
  training_layout layout;
  step_split seconds;
  memory_split memory;
  std::int64_t fullest = 0;  ///< the rank of the pipeline with the most memory
  bool fits = false;

  double step() const { return seconds.total(); }
};

/// The parts of a pipeline's work on a microbatch. A stage in the middle has blocks alone.
struct stage_times {
  part_time block, embedding, head;

  stage_times(const hardware& h, const training_job& job, const training_layout& l)
      : block(block_time(h, job, l)), embedding(embedding_time(h, job, l)), head(head_time(h, job, l)) {}

  /// The passes of so many layers, with what else the stage has.
  part_time of(std::int64_t layers, bool first, bool last) const {
    part_time out;
    const auto add = [&](double times, const part_time& part) {
      out.forward += times * part.forward, out.input += times * part.input;
      out.weight += times * part.weight, out.again += times * part.again;
    };
    add(static_cast<double>(layers), block);
    if (first) add(1, embedding);
    if (last) add(1, head);
    return out;
  }
};

namespace detail {

/// Seconds of adding a microbatch's gradients to those before: each is read and written.
inline double accumulation_seconds(const hardware& h, const training_job& job, const training_layout& l,
                                   double parameters) {
  const double bytes = job.program.gradient_bytes * (l.microbatches(job) > 1 ? 2 : 1);
  return memory_seconds(h, parameters * bytes, 0);
}

/// Seconds for which data-parallel communication is waited for, given a forward and a backward pass of all layers of
/// the rank. Gradients go out beside the last backward pass, and parameters come in beside the first forward pass, a
/// layer at a time; the last layer's gradients and the first one's parameters have nothing beside them. With parameters
/// cut (ZeRO-3) that happens in each microbatch, and parameters are gathered for both passes; with gradients cut
/// (ZeRO-2), gradients go out once or after each microbatch.
inline double data_seconds(const hardware& h, const training_job& job, const training_layout& l,
                           const group_place& group, double parameters, double layers, double forward,
                           double backward) {
  if (group.size == 1) return 0;
  const software& program = job.program;
  const double gradients = parameters * program.reduced_bytes, weights = parameters * program.weight_bytes;
  const double hidden = program.overlaps_data ? h.data_hidden : 0;
  const auto waits = [&](double all, double beside) {
    if (!program.overlaps_data) return all;
    return std::max(all - hidden * beside, all / std::max(layers, 1.0));
  };
  if (l.zero == zero_level::replicated)
    return waits(collective_seconds(h, group, collective::all_reduce, gradients), backward);
  const double out = collective_seconds(h, group, collective::reduce_scatter, gradients);
  const double in = collective_seconds(h, group, collective::all_gather, weights);
  const auto microbatches = static_cast<double>(l.microbatches(job));
  if (l.zero == zero_level::optimizer) return waits(out, backward) + waits(in, forward);
  const double reductions = program.reduces_each_microbatch ? microbatches : 1;
  if (l.zero == zero_level::gradients) return reductions * waits(out, backward) + waits(in, forward);
  // A gather and a reduction for each layer, with their own latencies.
  const double steps = std::max(layers, 1.0);
  const double out_all = steps * collective_seconds(h, group, collective::reduce_scatter, gradients / steps);
  const double in_all = steps * collective_seconds(h, group, collective::all_gather, weights / steps);
  return microbatches * waits(in_all, forward) + (microbatches - reductions) * waits(in_all, backward) +
         reductions * waits(in_all + out_all, backward);
}

/// Seconds of the optimizer: its state is read and written, gradients are read for their norm and for the update and
/// written once (to zero), weights are written.
inline double optimizer_seconds(const hardware& h, const training_job& job, const training_layout& l, double parameters,
                                std::int64_t copies) {
  const software& program = job.program;
  const double mine = parameters / (l.zero == zero_level::replicated ? 1.0 : static_cast<double>(copies));
  const double bytes = mine * (2 * program.optimizer_bytes + program.weight_bytes + 2 * program.gradient_bytes) +
                       parameters * program.gradient_bytes;
  return memory_seconds(h, bytes, 20);
}

}  // namespace detail

/// Seconds for which a message between stages holds up a rank: nothing but its launch where messages of one chunk pass
/// beside the computation of another. The activations are cut over tp as well, whether or not the sequence is.
inline double link_seconds(const hardware& h, const training_job& job, const training_layout& l) {
  if (job.program.overlaps_pipeline && l.chunks > 1) return h.launch;
  const double values =
      static_cast<double>(l.microbatch * job.seq * job.model.hidden) / static_cast<double>(l.cp * l.tp);
  return message_seconds(h, l.pp_axis(), job.program.activation_bytes() * values);
}

/// The price of a legal layout (`why_illegal` returns nothing); `fits` compares its memory with the hardware's.
inline layout_price price(const hardware& h, const training_job& job, const training_layout& l) {
  layout_price out;
  out.layout = l;
  const fullest_rank fullest = most_memory(h, job, l);
  out.memory = fullest.memory;
  out.fullest = fullest.rank;
  out.fits = out.memory.total() <= h.memory;

  const stage_times times(h, job, l);
  const stage_split split{job.model.layers, l.stages()};
  const std::int64_t m = l.microbatches(job);
  pipeline_costs costs;
  part_time busiest;
  double most_parameters = 0, most_experts = 0, most_layers = 0, accumulation = 0;
  for (std::int64_t r = 0; r < l.pp; ++r) {
    const std::int64_t layers = layers_of_rank(l, split, r);
    const part_time here = times.of(layers, r == 0, r == last_rank(l));
    const double parameters = rank_parameters(job, l, r), experts = rank_experts(job, l, r);
    const double adding = detail::accumulation_seconds(h, job, l, parameters + experts);
    const double all = here.forward.sum() + here.backward() + adding;
    costs.sum += all;
    costs.forward += here.forward.sum() / static_cast<double>(l.pp);
    costs.input += (here.input.sum() + here.again.sum()) / static_cast<double>(l.pp);
    costs.weight += (here.weight.sum() + adding) / static_cast<double>(l.pp);
    if (all > costs.busiest) costs.busiest = all, busiest = here, accumulation = adding;
    if (parameters + experts > most_parameters + most_experts)
      most_parameters = parameters, most_experts = experts, most_layers = static_cast<double>(layers);
  }
  costs.link = link_seconds(h, job, l);
  costs.delayed_norm = job.program.delayed_norm;
  const auto rounds = static_cast<double>(m);
  step_split& s = out.seconds;
  pass_time once = busiest.forward;
  once += busiest.input;
  once += busiest.weight;
  once += busiest.again;
  s.products = rounds * once.products;
  s.attention = rounds * once.attention;
  s.memory = rounds * (once.memory + accumulation);
  s.recompute = rounds * busiest.again.sum();
  s.tensor = rounds * once.tensor;
  s.context = rounds * once.context;
  s.experts = rounds * once.experts;
  s.bubble = pipeline_seconds(l, m, costs) - rounds * costs.busiest;
  // Experts' gradients go over groups of their own; what of the passes hides is shared out by bytes.
  const double all_parameters = most_parameters + most_experts, share = most_parameters / all_parameters;
  const auto reduced = [&](const group_place& group, double parameters, double part) {
    return detail::data_seconds(h, job, l, group, parameters, most_layers, part * busiest.forward.sum(),
                                part * busiest.backward());
  };
  s.data = reduced(place_group(h, l.cp_axis(), l.dp_axis()), most_parameters, share) +
           (most_experts > 0 ? reduced(place_group(h, l.expert_copies()), most_experts, 1 - share) : 0);
  s.optimizer = detail::optimizer_seconds(h, job, l, most_parameters, l.dp * l.cp) +
                (most_experts > 0 ? detail::optimizer_seconds(h, job, l, most_experts, l.expert_copies().extent) : 0);
  const std::int64_t unit = h.levels.front().ranks == 0 ? 1 : h.levels.front().ranks;
  const double units = std::max(1.0, static_cast<double>(l.ranks()) / static_cast<double>(unit));
  s.straggling = h.straggling * std::log2(units) * s.total();
  // Where ranks share cores, a step takes at least what all of them do, communication too, which moves memory there.
  if (h.cores > 0 && l.ranks() > h.cores) {
    const double pipelines = static_cast<double>(l.tp * l.cp * l.dp), ranks = static_cast<double>(l.ranks());
    const double busy = pipelines * rounds * costs.sum + ranks * (s.data + s.optimizer);
    const double waits =
        shared_cores_seconds(l, m, h.cores, l.tp * l.cp * l.dp, costs.forward + costs.input + costs.weight, h.turn);
    s.turns = std::max(0.0, busy / static_cast<double>(h.cores) + waits - s.total());
  }
  return out;
}

/// The share of the devices' peak that the model's operations take (Chowdhery et al. 2022, PaLM, appendix B), `counted`
/// being the part of attention's square that counts: 1 is the convention of most tables.
inline double utilisation(const hardware& h, const training_job& job, const training_layout& l, double seconds,
                          double counted = 1) {
  const double operations = job.tokens() * job.model.operations_per_token(job.seq, counted);
  return operations / (seconds * static_cast<double>(l.ranks()) * h.peak_of(job.program.products));
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
