// The bytes of memory of each rank of the pipeline, by purpose, from formulas. A test compares them with dry runs
// (plan/dry_run.hpp), which count the bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/schedule/expand.hpp"
#include "plait/schedule/parse.hpp"
#include "plait/schedule/verify.hpp"
#include "plan_llama/planner/block_time.hpp"
#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/pipeline_time.hpp"

namespace plait::planner {

/// Bytes of one rank at the fullest time of a step.
struct memory_split {
  double weights = 0;  ///< that products read
  double gradients = 0;
  double optimizer = 0;    ///< master copies and moments
  double activations = 0;  ///< kept from forward to backward passes, of all microbatches in flight
  double logits = 0;       ///< and their gradients, on the rank with the head
  double working = 0;      ///< of the present pass: gathered inputs, gradients of activations, recomputed values
  double buffers = 0;      ///< of communication: gathered parameters, buckets, messages of the pipeline
  double fragmentation = 0;
  double reserved = 0;  ///< that a process cannot allocate
  double host = 0;      ///< offloaded bytes in host memory; not part of the sums below

  constexpr double state() const { return weights + gradients + optimizer; }
  constexpr double allocated() const { return state() + activations + logits + working + buffers; }
  constexpr double total() const { return allocated() + fragmentation + reserved; }
};

/// Trained values of the experts on one rank of the pipeline. `expert_copies` ranks hold the same ones.
inline double rank_experts(const training_job& job, const training_layout& l, std::int64_t rank) {
  return static_cast<double>(blocks_of_rank(l, job.model, rank).alike) * job.model.layer_experts() /
         static_cast<double>(l.expert_pieces());
}

/// Trained values of a block on a rank, including its experts.
inline double rank_layer_parameters(const training_job& job, const training_layout& l) {
  return job.model.layer_parameters() / static_cast<double>(l.tp) +
         job.model.layer_experts() / static_cast<double>(l.expert_pieces());
}

/// Whether the head shares the embedding's table on its own rank: they are tied, and the first and the last stage of
/// the pipeline are on one rank.
inline bool is_tied_here(const training_job& job, const training_layout& l) {
  return job.model.tied && last_rank(l) == 0;
}
/// Whether two ranks of the pipeline hold the tied embedding, and sum its gradients.
inline bool is_tied_across(const training_job& job, const training_layout& l) {
  return job.model.tied && last_rank(l) != 0;
}

/// Returns the bytes that each of the two adds to that sum.
inline double tied_bytes(const training_job& job, const training_layout& l) {
  const auto values = static_cast<double>(job.model.vocab) * static_cast<double>(job.model.hidden);
  const bool cut = l.zero != zero_level::replicated && !(l.zero == zero_level::optimizer && job.program.reduces_whole);
  return values / static_cast<double>(l.tp) / static_cast<double>(cut ? l.pieces() : 1) * job.program.reduced_bytes;
}

/// Trained values of a block on a rank, after tensor parallelism has cut them, without experts.
inline double block_parameters(const training_job& job, const training_layout& l) {
  const transformer_shape& m = job.model;
  const rank_sizes z(job, l);
  const double matrices = z.hidden * (2 * z.query + 2 * z.kv + (m.wide_products() + 1) * z.dense);
  return matrices + m.layer_vectors() + m.layer_cut_biases() / static_cast<double>(l.tp);
}

/// Trained values on one rank of the pipeline, after tensor parallelism has cut them, without experts.
inline double rank_parameters(const training_job& job, const training_layout& l, std::int64_t rank) {
  const transformer_shape& m = job.model;
  const rank_sizes z(job, l);
  const block_counts blocks = blocks_of_rank(l, m, rank);
  double all = static_cast<double>(blocks.alike) * block_parameters(job, l);
  if (blocks.first > 0) all += static_cast<double>(blocks.first) * block_parameters(job.of_first_blocks(), l);
  if (rank == 0) all += (z.vocab + static_cast<double>(m.positions)) * z.hidden;
  if (rank == last_rank(l)) {
    all += z.hidden * (m.biases ? 2 : 1);
    if (!is_tied_here(job, l)) all += z.vocab * z.hidden;  // a pipeline holds a tied one twice
  }
  return all;
}

/// Returns the bytes that one block keeps for its backward pass, for one microbatch on one rank, including its input.
/// Values of each token, if all are kept: block's input, two norms' outputs and the residual's middle 4 hidden, with a
/// byte for each of two dropout masks; queries, keys, values and attention's output 2 query + 2 kv; gate, wide and
/// their product 2 or 3 wide; one float for each head (FlashAttention), or unfused scores: 2 bytes of softmax, 3 with
/// dropout (Korthikanti et al. 2022, section 4.1: s b h (34 + 5 a s/h) for GPT).
///
/// Programs that keep inputs of products in fp8 have a byte for norms' outputs and for the activation's product, and
/// another one for attention's output, which is also kept in bf16. Selective recomputation drops the outputs of norms
/// and of the activation, or the scores. Full recomputation keeps only the input.
inline double block_kept_bytes(const training_job& job, const training_layout& l, plait::recompute policy) {
  const transformer_shape& m = job.model;
  const software& program = job.program;
  const rank_sizes z(job, l);
  const double e = program.activation_bytes();
  const double input = e * z.hidden * z.cut_tokens;
  if (policy == plait::recompute::full) return input;
  const double statistics = 2 * 4 * z.cut_tokens;
  const bool eighths = program.keeps_fp8 && program.products == number_kind::fp8;
  const double gathered = program.keeps_gathered && l.cuts_sequence() ? dense_parts(m) * e * z.hidden * z.tokens : 0;
  const double kept_form = eighths ? 0.5 : 1;  // bytes relative to bf16
  const double norms = 2 * input * kept_form, gates = m.wide_products();
  const double masks = m.dropout ? 2 * z.hidden * z.cut_tokens : 0;
  // Attention's own backward pass needs its output in bf16.
  const double attention = e * z.tokens * (2 * z.query + 2 * z.exchanged_kv) + (eighths ? z.tokens * z.query : 0);
  const double wide = e * gates * z.activated(), product = e * z.activated() * kept_form;
  // The inputs of experts are kept in addition to the router's, and their outputs until they are weighted.
  const double exchanged = m.experts > 0 ? e * z.routed * z.hidden * (1 + kept_form) : 0;
  // The router's scores. With 4 bytes each: the choices of a token, the weights and places of its rows, and, if ranks
  // exchange rows, the order of experts and its inverse.
  const double routes = m.experts > 0
                            ? z.cut_tokens * (e * static_cast<double>(m.experts) + 4 * static_cast<double>(m.chosen)) +
                                  4 * z.routed * (l.ep > 1 ? 4 : 2)
                            : 0;
  // The shared expert's gate of each token, and the output that it multiplies.
  const double gate = m.shared_gate ? e * z.cut_tokens * (1 + z.hidden) : 0;
  const double heads = z.query / static_cast<double>(m.head_dim), kv_heads = z.kv / static_cast<double>(m.head_dim);
  // Queries and keys before their norms, and a float for each.
  const double qk_norms = m.qk_norm_over_heads ? z.tokens * (e * (m.query_width() + m.kv_width()) + 4 * 2)
                          : m.qk_norm          ? z.tokens * (e * (z.query + z.kv) + 4 * (heads + kv_heads))
                                               : 0;
  const bool fused = program.attention != attention_kernel::unfused;
  const double scores =
      fused ? 4 * z.tokens * heads : z.tokens * static_cast<double>(job.seq) * heads * (m.dropout ? e * 2 + 1 : e);
  double kept = 2 * input + norms + gathered + statistics + masks + attention + wide + product + exchanged + routes +
                gate + qk_norms + scores;
  if (policy == plait::recompute::selective) {
    if (program.selective_drops_scores_only)
      kept -= fused ? 0 : scores;
    else
      kept -= norms + gathered + e * z.tokens * z.dense * kept_form;
  }
  return kept;
}

/// Returns why a layout's offload has no price on a machine; empty if it has one.
inline std::string why_no_host_link(const hardware& h, const training_layout& l) {
  if (h.host_bandwidth > 0 || !(l.offload_activations || l.offload_optimizer)) return {};
  return cat({"offload is ", offload_text(l), " and ", h.name,
              " has no host_bandwidth; legal is none, or a description that gives host_bandwidth"});
}

/// Returns the bytes of the logits of a chunk of the loss, and of their gradients.
inline double logit_bytes(const training_job& job, const training_layout& l) {
  const rank_sizes z(job, l);
  const std::int64_t positions = std::max<std::int64_t>(1, l.positions(job));
  const std::int64_t of_chunk = (positions + l.loss_chunks - 1) / l.loss_chunks;
  const double part = static_cast<double>(of_chunk) / static_cast<double>(positions);
  return part * z.tokens * z.vocab * job.program.logit_bytes;
}

/// The step of a layout that offloads activations, as the trainer runs it. Units are the embedding, each block and the
/// head.
class offloaded_step {
 public:
  offloaded_step(const training_job& job, const training_layout& l) {
    const rank_sizes z(job, l);
    std::vector<step_unit> units;
    std::int64_t layer = 0;
    const auto add = [&](std::int64_t stage, double bytes) {
      units.push_back({.stage = static_cast<int>(stage), .kept_bytes = bytes});
    };
    for (std::int64_t stage = 0; stage < l.stages(); ++stage) {
      if (stage == 0) add(stage, 0);
      for (const std::int64_t end = layer + blocks_of_stage(job.model, l.stages(), stage).all(); layer < end; ++layer) {
        const bool again = (layer + 1) % l.recompute_every == 0;
        add(stage, block_kept_bytes(job, l, again ? l.recompute : plait::recompute::none));
      }
    }
    // The input of the head, its norm's output, and the scores.
    add(l.stages() - 1, 2 * job.program.activation_bytes() * z.hidden * z.cut_tokens + logit_bytes(job, l));
    const std::string name = l.pp == 1 ? name_of(schedule_kind::one_f_one_b) : schedule_text(l);
    step_ = with_offload(expand(parse_schedule(name, static_cast<int>(l.pp), static_cast<int>(l.microbatches(job))),
                                std::move(units), {}));
  }

  const step_schedule& program() const { return step_; }
  /// Returns the most bytes of blocks' activations on a rank's device at one time; the head's count as logits.
  double on_device(std::int64_t rank) const {
    step_schedule blocks = step_;
    blocks.units.back().kept_bytes = 0;
    return peak_bytes(blocks, static_cast<int>(rank), {.parameter = 0, .gradient = 0});
  }
  /// Returns the most bytes of a rank's activations in host memory at one time.
  double on_host(std::int64_t rank) const { return peak_host_bytes(step_, static_cast<int>(rank)); }

 private:
  step_schedule step_;
};

/// Returns the step of a layout that offloads activations; nothing for other layouts.
inline std::optional<offloaded_step> offloaded_step_of(const training_job& job, const training_layout& l) {
  if (!l.offload_activations) return std::nullopt;
  return offloaded_step(job, l);
}

/// The load of a rank of the pipeline: the memory that does not depend on how state is cut over the data ranks, and the
/// amount of state.
struct rank_load {
  double parameters = 0, experts = 0;  ///< trained values
  double layer = 0;                    ///< trained values of the largest block, including its experts
  memory_split passes;                 ///< activations, logits, working memory and messages

  rank_load(const training_job& job, const training_layout& l, std::int64_t rank)
      : rank_load(job, l, rank, offloaded_step_of(job, l)) {}
  rank_load(const training_job& job, const training_layout& l, std::int64_t rank,
            const std::optional<offloaded_step>& away)
      : parameters(rank_parameters(job, l, rank)), experts(rank_experts(job, l, rank)) {
    const software& program = job.program;
    const rank_sizes z(job, l);
    const double e = program.activation_bytes();
    const block_counts blocks = blocks_of_rank(l, job.model, rank);
    const double in_flight = microbatches_in_flight(l, l.microbatches(job), rank);
    double of_block = 0;  // working memory, of the block that takes most
    const auto add_blocks = [&](const training_job& of, std::int64_t count) {
      const double everything = block_kept_bytes(of, l, plait::recompute::none);
      const double by_policy =
          l.recompute == plait::recompute::none ? everything : block_kept_bytes(of, l, l.recompute);
      const double kept = everything - (everything - by_policy) / static_cast<double>(l.recompute_every);
      passes.activations += in_flight * static_cast<double>(count) * kept;
      layer = std::max(layer, rank_layer_parameters(of, l));
      const double activated = e * (of.model.wide_products() + 1) * rank_sizes(of, l).activated();
      of_block = std::max(of_block, activated + everything - by_policy);
    };
    if (blocks.alike > 0 || blocks.first == 0) add_blocks(job, blocks.alike);
    if (blocks.first > 0) add_blocks(job.of_first_blocks(), blocks.first);
    if (away) passes.activations = away->on_device(rank), passes.host = away->on_host(rank);
    passes.working = 2 * e * z.hidden * z.tokens + of_block;
    if (program.fixed_order_attention) {
      const std::int64_t keys = l.context == context_kind::ring ? job.seq / l.cp : job.seq;
      passes.working += 2 * z.tokens * static_cast<double>(keys) * z.query / static_cast<double>(job.model.head_dim);
    }
    // Selective recomputation makes the norm's output of attention or of the MLP again, one at a time.
    if (l.recompute == plait::recompute::selective && !program.selective_drops_scores_only)
      passes.working -= e * z.hidden * (z.cut_tokens + (program.keeps_gathered && l.cuts_sequence() ? z.tokens : 0));
    if (rank == last_rank(l)) passes.logits = logit_bytes(job, l);
    if (l.pp > 1) passes.buffers += 4 * e * z.hidden * z.cut_tokens;
    // Rows that came from other ranks are copied into the order of experts.
    if (l.ep > 1) passes.buffers += e * z.hidden * z.routed;
    // A ring has two blocks of keys and values: one in use, and one arriving. Backward it also has their gradients.
    if (l.cp > 1 && l.context == context_kind::ring) passes.buffers += 4 * 2 * e * z.kv * z.tokens;
  }
};

/// Returns the memory of a rank of the pipeline, given the memory of its passes.
inline memory_split rank_memory(const hardware& h, const training_job& job, const training_layout& l,
                                const rank_load& load) {
  const software& program = job.program;
  const auto pieces = static_cast<double>(l.pieces()), expert_copies = static_cast<double>(l.expert_copies());
  memory_split out = load.passes;
  const bool masters_alone = program.gathers_masters && l.zero == zero_level::parameters && pieces > 1;
  // A level of ZeRO cuts state over dp and cp, or over those of them that hold no copies. It cuts experts over the
  // ranks that have the same experts.
  const auto held = [&](zero_level from) {
    const bool cut = l.zero >= from && l.zero != zero_level::replicated;
    return load.parameters / (cut ? pieces : 1.0) + load.experts / (cut ? expert_copies : 1.0);
  };
  out.weights = masters_alone ? 0 : held(zero_level::parameters) * program.weight_bytes;
  out.gradients = held(zero_level::gradients) * program.gradient_bytes;
  (l.offload_optimizer ? out.host : out.optimizer) += held(zero_level::optimizer) * program.optimizer_bytes;
  if (pieces > 1) {
    if (l.zero == zero_level::parameters) out.buffers += 2 * load.layer * program.weight_bytes;
    // Gradients that microbatches add to are whole until they are reduced into the rank's part. If each microbatch is
    // reduced, nothing is added to them before, so they have the type in which they are sent. With one microbatch a
    // pass adds to one layer while two are reduced. Meanwhile it frees what two layers kept.
    const double whole = load.layer * program.gradient_bytes;
    const double kept = l.offload_activations ? 0 : block_kept_bytes(job, l, l.recompute);
    if (l.zero >= zero_level::gradients)
      out.buffers += program.reduces_each_microbatch ? load.layer * program.reduced_bytes
                     : l.microbatches(job) == 1      ? whole + 2 * std::max(0.0, whole - kept)
                                                     : (load.parameters + load.experts) * program.gradient_bytes;
  }
  out.fragmentation = h.fragmentation * out.allocated();
  out.reserved = h.reserved;
  return out;
}

/// Returns the memory of one rank of the pipeline.
inline memory_split rank_memory(const hardware& h, const training_job& job, const training_layout& l,
                                std::int64_t rank) {
  return rank_memory(h, job, l, rank_load(job, l, rank));
}

/// The loads of the ranks that may be the fullest. Kept bytes fall from rank to rank, so only the first two, which may
/// have one more layer, and the last matter.
struct pipeline_loads {
  std::array<std::int64_t, 3> ranks{};
  std::array<std::optional<rank_load>, 3> loads{};

  pipeline_loads(const training_job& job, const training_layout& l) : ranks{0, 1, l.pp - 1} {
    const std::optional<offloaded_step> away = offloaded_step_of(job, l);
    loads[0].emplace(job, l, 0, away);
    if (l.pp > 1) loads[1].emplace(job, l, 1, away);
    if (l.pp > 2) loads[2].emplace(job, l, l.pp - 1, away);
  }
};

/// The fullest rank of the pipeline and its memory. Its host memory is the most that any rank needs.
struct fullest_rank {
  std::int64_t rank = 0;
  memory_split memory;
};

inline fullest_rank most_memory(const hardware& h, const training_job& job, const training_layout& l,
                                const pipeline_loads& of) {
  fullest_rank out{0, rank_memory(h, job, l, *of.loads[0])};
  for (std::size_t i = 1; i < of.loads.size() && of.loads[i]; ++i) {
    const memory_split here = rank_memory(h, job, l, *of.loads[i]);
    const double host = std::max(here.host, out.memory.host);
    if (here.total() > out.memory.total()) out = {of.ranks[i], here};
    out.memory.host = host;
  }
  return out;
}

inline fullest_rank most_memory(const hardware& h, const training_job& job, const training_layout& l) {
  return most_memory(h, job, l, pipeline_loads(job, l));
}

}  // namespace plait::planner
