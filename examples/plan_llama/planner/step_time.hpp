// The price of a layout: the time of a training step and the memory of its fullest rank, by formulas that take
// microseconds. Copies of offloaded activations are simulated, which takes milliseconds.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "plait/schedule/simulate.hpp"
#include "plan_llama/planner/memory.hpp"

namespace plait::planner {

/// The seconds of a step by purpose, on the busiest rank. Only communication that nothing hides counts.
struct step_split {
  double products = 0, attention = 0, memory = 0;  ///< computing, including recomputation
  double recompute = 0;                            ///< recomputation, a part of these
  double tensor = 0, context = 0;                  ///< communication of tp and cp
  double experts = 0;                              ///< the exchange of tokens with experts
  double bubble = 0;                               ///< idle in the pipeline, including messages
  double data = 0;                                 ///< communication over dp (and cp) of gradients and parameters
  double optimizer = 0;
  double offload = 0;  ///< waiting for copies of activations to the host's memory and back
  double straggling = 0;
  double turns = 0;  ///< waiting for cores, if ranks share them

  constexpr double computing() const { return products + attention + memory; }
  constexpr double total() const {
    return computing() + tensor + context + experts + bubble + data + optimizer + offload + straggling + turns;
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

/// The parts of a pipeline's work on a microbatch. A stage in the middle has only blocks.
struct stage_times {
  part_time block, first_block, embedding, head;  ///< first_block: of the first blocks, if they differ

  stage_times(const hardware& h, const training_job& job, const training_layout& l)
      : block(block_time(h, job, l)), embedding(embedding_time(h, job, l)), head(head_time(h, job, l)) {
    if (job.model.dense_layers > 0) first_block = block_time(h, job.of_first_blocks(), l);
  }

  /// Returns the passes of these blocks, and of the embedding and the head if the stage has them.
  part_time of(const block_counts& blocks, bool first, bool last) const {
    part_time out;
    const auto add = [&](double times, const part_time& part) {
      out.forward += times * part.forward, out.input += times * part.input;
      out.weight += times * part.weight, out.again += times * part.again;
    };
    add(static_cast<double>(blocks.alike), block);
    add(static_cast<double>(blocks.first), first_block);
    if (first) add(1, embedding);
    if (last) add(1, head);
    return out;
  }
};

/// Returns the seconds of broadcasts, one after the other, in which each rank of a group sends its part of an array of
/// `bytes` to all others. Each broadcast passes every link once. The last rank of the ring has it after as many steps
/// as there are ranks (nccl/src/graph/tuning.cc).
inline double broadcasts_seconds(const hardware& h, const group_place& g, double bytes) {
  if (g.size <= 1) return 0;
  const auto n = static_cast<double>(g.size);
  double steps = 0;
  crossing_seconds all;
  each_crossed_level(h, g, [&](const network_level& level, double inside, double together) {
    all.add(level, bytes / n / inside * sharing(level) / level.bandwidth);
    steps += (n / inside - n / together) * level.latency;
  });
  return n * (all.launch + steps + all.slowest + std::min(all.fill, all.slowest));
}

namespace detail {

/// Returns the seconds of adding a microbatch's gradients to earlier ones: each is read and written. Programs that pack
/// gradients copy each to its place, cast it to the type that is sent, and divide it there by the number of ranks.
inline double accumulation_seconds(const hardware& h, const training_job& job, const training_layout& l,
                                   double parameters) {
  const software& program = job.program;
  if (program.packs_gradients && program.reduces_each_microbatch && l.zero >= zero_level::gradients) {
    const double own = program.weight_bytes, sent = program.reduced_bytes;
    return memory_seconds(h, parameters * (2 * own + (sent != own ? own + sent : 0) + 2 * sent), 0);
  }
  const double bytes = job.program.gradient_bytes * (l.microbatches(job) > 1 ? 2 : 1);
  return memory_seconds(h, parameters * bytes, 0);
}

/// The groups in which gradients and parameters move: the ranks over which they are cut, the ranks with copies of a
/// piece in a hybrid, and all of them.
struct data_groups {
  group_place cut, copies, all;

  data_groups(const hardware& h, const training_layout& l)
      : cut(place_group(h, l.cut_cp_axis(), l.cut_dp_axis())),
        copies(place_group(h, l.copies_axis())),
        all(place_group(h, {l.cp * l.near_dp(), l.tp}, l.dp_axis())) {}
  explicit data_groups(const group_place& one) : cut(one), all(one) {}
};

/// Whether each rank gets whole sums of gradients.
inline bool sums_whole(const software& program, const training_layout& l) {
  return l.zero == zero_level::replicated || (l.zero == zero_level::optimizer && program.reduces_whole);
}

/// The seconds in which gradients are reduced, and, in a hybrid, pieces are summed over their copies.
struct reduction_time {
  double reduce = 0, copies = 0;

  reduction_time(const hardware& h, const software& program, const training_layout& l, const data_groups& groups,
                 double bytes) {
    if (sums_whole(program, l)) {
      reduce = collective_seconds(h, groups.all, collective::all_reduce, bytes);
      return;
    }
    reduce = collective_seconds(h, groups.cut, collective::reduce_scatter, bytes);
    copies = collective_seconds(h, groups.copies, collective::all_reduce, bytes / static_cast<double>(groups.cut.size));
  }
  constexpr double sum() const { return reduce + copies; }
};

/// Returns the seconds in which all ranks gather parameters that are cut over them.
inline double gather_seconds(const hardware& h, const software& program, const training_layout& l,
                             const data_groups& groups, double bytes) {
  if (program.broadcasts_slices && l.zero != zero_level::parameters) return broadcasts_seconds(h, groups.cut, bytes);
  return collective_seconds(h, groups.cut, collective::all_gather, bytes);
}

/// Returns the seconds that a rank waits for data-parallel communication, given a forward and a backward pass of all
/// its layers. Gradients are reduced during the last backward pass, and parameters are gathered during the first
/// forward pass, a layer at a time. Nothing hides the last layer's gradients and the first layer's parameters. With
/// parameters cut (ZeRO-3) this happens in each microbatch, and parameters are gathered for both passes. With gradients
/// cut (ZeRO-2), gradients are reduced once or after each microbatch. A hybrid sums copies after that.
inline double data_seconds(const hardware& h, const training_job& job, const training_layout& l,
                           const data_groups& groups, double parameters, double layers, double forward,
                           double backward) {
  if (groups.cut.size == 1) return 0;
  const software& program = job.program;
  const double gradients = parameters * program.reduced_bytes, weights = parameters * program.weight_bytes;
  const double hidden = program.overlaps_data ? h.data_hidden : 0;
  const auto waits = [&](double all, double beside) {
    if (!program.overlaps_data) return all;
    return std::max(all - hidden * beside, all / std::max(layers, 1.0));
  };
  const double out = reduction_time(h, program, l, groups, gradients).sum();
  if (l.zero == zero_level::replicated) return waits(out, backward);
  const double in = gather_seconds(h, program, l, groups, weights);
  const auto microbatches = static_cast<double>(l.microbatches(job));
  const double awaited = program.broadcasts_slices ? in : waits(in, forward);
  if (l.zero == zero_level::optimizer) return waits(out, backward) + awaited;
  const double reductions = program.reduces_each_microbatch ? microbatches : 1;
  if (l.zero == zero_level::gradients) return reductions * waits(out, backward) + awaited;
  // Each layer has a gather and a reduction with a latency.
  const double steps = std::max(layers, 1.0);
  const double out_all = steps * reduction_time(h, program, l, groups, gradients / steps).sum();
  const double in_all = steps * gather_seconds(h, program, l, groups, weights / steps);
  if (program.gathers_late)
    return microbatches * (waits(in_all, forward) + in_all) + reductions * waits(out_all, backward);
  return microbatches * waits(in_all, forward) + (microbatches - reductions) * waits(in_all, backward) +
         reductions * waits(in_all + out_all, backward);
}

/// Returns the seconds in which the first and the last stage sum the gradients of an embedding that both hold; only of
/// the rank's piece if gradients are cut. This comes after all passes.
inline double tied_seconds(const hardware& h, const training_job& job, const training_layout& l) {
  if (!is_tied_across(job, l)) return 0;
  return collective_seconds(h, place_group(h, {2, l.pp_axis().stride * last_rank(l)}), collective::all_reduce,
                            tied_bytes(job, l));
}

/// Returns the seconds of the optimizer: its state is read and written, gradients are read for their norm and for the
/// update and written once (to zero), weights are written.
inline double optimizer_seconds(const hardware& h, const training_job& job, const training_layout& l, double parameters,
                                std::int64_t pieces) {
  const software& program = job.program;
  const double mine = parameters / (l.zero == zero_level::replicated ? 1.0 : static_cast<double>(pieces));
  const double state = mine * 2 * program.optimizer_bytes;
  const double others =
      mine * (program.weight_bytes + 2 * program.gradient_bytes) + parameters * program.gradient_bytes;
  if (l.offload_optimizer) return memory_seconds(h, others, 20) + state / h.host_bandwidth;
  return memory_seconds(h, others + state, 20);
}

/// Returns the seconds that passes of a step wait for copies of activations: the difference of a simulated step and one
/// whose copies take no time.
inline double offload_seconds(const hardware& h, const training_job& job, const training_layout& l,
                              const stage_times& times, double link) {
  const offloaded_step step(job, l);
  step_costs costs;
  costs.message = link;
  const auto add = [&](const part_time& part, double parameters) {
    const double input = part.input.sum() + part.again.sum();
    const double weight = part.weight.sum() + accumulation_seconds(h, job, l, parameters);
    costs.units.push_back({part.forward.sum(), input + weight, input, weight});
  };
  const double table = static_cast<double>(job.model.vocab * job.model.hidden) / static_cast<double>(l.tp);
  add(times.embedding, table);
  for (std::int64_t layer = 0; layer < job.model.layers; ++layer) add(times.block, rank_layer_parameters(job, l));
  add(times.head, is_tied_here(job, l) ? 0 : table);
  const double alone = simulate(step.program(), costs).period;
  costs.copy_bandwidth = h.host_bandwidth;
  return std::max(0.0, simulate(step.program(), costs).period - alone);
}

}  // namespace detail

/// Returns the seconds of a message between stages. Activations are cut over tp, with and without sequence parallelism.
inline double stage_message_seconds(const hardware& h, const training_job& job, const training_layout& l) {
  const double values = rank_sizes(job, l).tokens * static_cast<double>(job.model.hidden) / static_cast<double>(l.tp);
  return message_seconds(h, l.pp_axis(), job.program.activation_bytes() * values);
}
/// Returns the seconds that a message between stages delays a rank. If messages of one chunk travel during a pass of
/// another, which takes `beside` seconds, it is their launch, or the part that is longer than the pass.
inline double link_seconds(const hardware& h, const training_job& job, const training_layout& l, double beside) {
  const double message = stage_message_seconds(h, job, l);
  return job.program.overlaps_pipeline && l.chunks > 1 ? std::max(h.launch, message - beside) : message;
}
/// Returns the seconds of all messages between two stages in one direction, one after the other: no step is shorter.
inline double wire_seconds(const hardware& h, const training_job& job, const training_layout& l) {
  if (l.pp == 1) return 0;
  return static_cast<double>(l.microbatches(job) * l.chunks) * stage_message_seconds(h, job, l);
}

/// The price of a step's passes, which does not depend on how state is cut over the data ranks.
struct passes_price {
  step_split seconds;                  ///< without data parallelism, the optimizer, stragglers and shared cores
  double forward = 0, backward = 0;    ///< of one microbatch on the busiest rank
  double parameters = 0, experts = 0;  ///< of the rank with the most parameters
  double layers = 0;                   ///< of that rank
  pipeline_costs costs;
};

inline passes_price price_passes(const hardware& h, const training_job& job, const training_layout& l,
                                 const stage_times& times) {
  if (const std::string why = why_no_host_link(h, l); !why.empty()) fail(why);
  passes_price out;
  const std::int64_t m = l.microbatches(job);
  pipeline_costs& costs = out.costs;
  part_time busiest;
  double accumulation = 0;
  part_time here;
  std::optional<block_counts> before;  // of the rank before, if it has neither the embedding nor the head
  double parameters = 0, experts = 0, adding = 0, all = 0;
  for (std::int64_t r = 0; r < l.pp; ++r) {
    const block_counts blocks = blocks_of_rank(l, job.model, r);
    const bool ends = r == 0 || r == last_rank(l);
    if (ends || before != blocks) {
      here = times.of(blocks, r == 0, r == last_rank(l));
      parameters = rank_parameters(job, l, r), experts = rank_experts(job, l, r);
      adding = detail::accumulation_seconds(h, job, l, parameters + experts);
      all = here.forward.sum() + here.backward() + adding;
    }
    before = ends ? std::nullopt : std::optional(blocks);
    costs.sum += all;
    costs.forward += here.forward.sum() / static_cast<double>(l.pp);
    costs.input += (here.input.sum() + here.again.sum()) / static_cast<double>(l.pp);
    costs.weight += (here.weight.sum() + adding) / static_cast<double>(l.pp);
    if (all > costs.busiest) costs.busiest = all, busiest = here, accumulation = adding;
    if (parameters + experts > out.parameters + out.experts)
      out.parameters = parameters, out.experts = experts, out.layers = static_cast<double>(blocks.all());
  }
  costs.link = link_seconds(h, job, l, costs.forward / static_cast<double>(l.chunks));
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
  s.bubble = std::max(pipeline_seconds(l, m, costs), wire_seconds(h, job, l)) - rounds * costs.busiest;
  if (l.offload_activations) s.offload = detail::offload_seconds(h, job, l, times, costs.link);
  out.forward = busiest.forward.sum(), out.backward = busiest.backward();
  return out;
}

inline passes_price price_passes(const hardware& h, const training_job& job, const training_layout& l) {
  return price_passes(h, job, l, stage_times(h, job, l));
}

/// Returns the price of a layout whose passes and memory are known.
inline layout_price price_around(const hardware& h, const training_job& job, const training_layout& l,
                                 const passes_price& passes, const fullest_rank& fullest) {
  layout_price out{l, passes.seconds, fullest.memory, fullest.rank, false};
  out.fits = out.memory.total() <= h.memory && (out.memory.host == 0 || out.memory.host <= h.host_memory);
  step_split& s = out.seconds;
  // Experts' gradients use other groups. The time of passes that hides communication is divided by bytes.
  const double share = passes.parameters / (passes.parameters + passes.experts);
  const auto reduced = [&](const detail::data_groups& groups, double parameters, double part) {
    return detail::data_seconds(h, job, l, groups, parameters, passes.layers, part * passes.forward,
                                part * passes.backward);
  };
  s.data = reduced(detail::data_groups(h, l), passes.parameters, share);
  s.data += detail::tied_seconds(h, job, l);
  s.optimizer = detail::optimizer_seconds(h, job, l, passes.parameters, l.pieces());
  if (passes.experts > 0) {
    const group_place copies = place_group(h, l.expert_copies_axis(), l.expert_copies_over_dp());
    s.data += reduced(detail::data_groups(copies), passes.experts, 1 - share);
    s.optimizer += detail::optimizer_seconds(h, job, l, passes.experts, l.expert_copies());
  }
  const std::int64_t unit = h.levels.front().ranks == 0 ? 1 : h.levels.front().ranks;
  const double units = std::max(1.0, static_cast<double>(l.ranks()) / static_cast<double>(unit));
  s.straggling = h.straggling * std::log2(units) * s.total();
  // If ranks share cores, a step takes at least the work of all of them, including communication, which moves memory.
  if (h.cores > 0 && l.ranks() > h.cores) {
    const pipeline_costs& costs = passes.costs;
    const std::int64_t m = l.microbatches(job);
    const double pipelines = static_cast<double>(l.tp * l.cp * l.dp), ranks = static_cast<double>(l.ranks());
    const double busy = pipelines * static_cast<double>(m) * costs.sum + ranks * (s.data + s.optimizer);
    const double waits =
        shared_cores_seconds(l, m, h.cores, l.tp * l.cp * l.dp, costs.forward + costs.input + costs.weight, h.turn);
    s.turns = std::max(0.0, busy / static_cast<double>(h.cores) + waits - s.total());
  }
  return out;
}

/// Returns the price of a legal layout (`why_illegal` returns nothing). `fits` compares its memory, and its offloaded
/// bytes, with the hardware's. Throws `error` if it offloads to a host whose link is not described.
inline layout_price price(const hardware& h, const training_job& job, const training_layout& l) {
  return price_around(h, job, l, price_passes(h, job, l), most_memory(h, job, l));
}

/// Returns the share of the devices' peak that the model's operations take (Chowdhery et al. 2022, PaLM, appendix B).
/// `counted` is the part of attention's square that counts: 1 is the convention of most tables.
inline double utilisation(const hardware& h, const training_job& job, const training_layout& l, double seconds,
                          double counted = 1) {
  const double operations = job.tokens() * job.model.operations_per_token(job.seq, counted);
  return operations / (seconds * static_cast<double>(l.ranks()) * h.peak_of(job.program.products));
}

}  // namespace plait::planner
