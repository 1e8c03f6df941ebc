// The bytes that one rank hands to communication in a step, by axis, from a layout's formulas. Tests compare them with
// the ledger of a run (comm/metrics.hpp). Their time is in step_time.hpp.
#pragma once

#include <cstdint>

#include "plan_llama/planner/memory.hpp"

namespace plait::planner {

/// Bytes that one rank hands to communication in a step. An all-gather counts the rank's part; a reduce-scatter or an
/// all-reduce counts the whole array (the payload of `wire_bytes`); messages to other stages count in full. Scalars,
/// such as losses and norms, and gradients of norms over tp do not count.
struct step_traffic {
  double tensor = 0, context = 0, experts = 0, pipeline = 0, data = 0;
  double ends = 0;  ///< gradients of an embedding that the first and the last stage hold

  constexpr double total() const { return tensor + context + experts + pipeline + data + ends; }
};

/// Traffic of a rank of the pipeline. A block's two halves each have an all-gather and a reduce-scatter, forward and
/// backward; an embedding and a head each have one of them in each direction. A layer that recomputes in full sends
/// again; gathered inputs that are not kept are gathered again. A hybrid sums reduced pieces over its copies.
inline step_traffic rank_traffic(const training_job& job, const training_layout& l, std::int64_t rank) {
  const software& program = job.program;
  const rank_sizes z(job, l);
  const double e = program.activation_bytes(), whole = e * z.hidden * z.tokens, cut = e * z.hidden * z.cut_tokens;
  const auto microbatches = static_cast<double>(l.microbatches(job));
  const block_counts blocks = blocks_of_rank(l, job.model, rank);
  const auto layers = static_cast<double>(blocks.all()), routers = static_cast<double>(blocks.alike);
  const double ends = (rank == 0 ? 1 : 0) + (rank == last_rank(l) ? 1 : 0);
  const bool full = l.recompute == plait::recompute::full;
  const double again = full ? 1.0 / static_cast<double>(l.recompute_every) : 0;
  step_traffic out;
  if (l.tp > 1) {
    if (l.cuts_sequence()) {
      const bool dropped = !program.keeps_gathered ||
                           (l.recompute == plait::recompute::selective && !program.selective_drops_scores_only);
      const auto of_blocks = [&](const transformer_shape& m, std::int64_t count) {
        const double reductions = tensor_parts(m, l) * (2 + again);
        const double gathers = reductions + (dropped ? dense_parts(m) * (1 - again) : 0);
        return static_cast<double>(count) * (gathers * cut + reductions * whole);
      };
      out.tensor = microbatches * (of_blocks(job.model, blocks.alike) + ends * (cut + whole));
      if (blocks.first > 0) out.tensor += microbatches * of_blocks(job.model.of_first_blocks(), blocks.first);
      // The experts that tokens chose and their weights are gathered, 4 bytes each; the weights' gradients are reduced.
      if (!l.folds_experts)
        out.tensor += microbatches * routers * static_cast<double>(job.model.chosen) *
                      (8 * (1 + again) * z.cut_tokens + 4 * z.tokens);
      // The head does not keep its gathered input either.
      if (rank == last_rank(l) && l.recompute != plait::recompute::none && !program.selective_drops_scores_only)
        out.tensor += microbatches * cut;
    } else {
      out.tensor = microbatches * (layers * (4 + 2 * again) + ends) * whole;
    }
  }
  // Queries and keys are gathered, and their gradients in the backward pass.
  if (l.tp > 1 && job.model.qk_norm_over_heads)
    out.tensor += microbatches * layers * (2 + again) * e * z.tokens * (z.query + z.kv);
  // Rows go to their experts and back, forward and backward, after 4 bytes for each expert with its number of rows.
  if (l.ep > 1)
    out.experts =
        microbatches * routers *
        ((4 + 2 * again) * e * z.hidden * z.routed + (1 + again) * 4 * static_cast<double>(job.model.experts));
  if (l.cp > 1) {
    const double own = z.tokens * 2 * z.kv * e, passes = 1 + again;
    if (l.context == context_kind::ulysses)
      out.context = microbatches * layers * (passes + 1) * 2 * z.tokens * (z.query + z.exchanged_kv) * e;
    else if (l.context == context_kind::all_gather_kv)
      out.context = microbatches * layers * (passes * own + own + own * static_cast<double>(l.cp));
    else  // blocks of keys and values travel; in the backward pass their gradients travel with them
      out.context = microbatches * layers * static_cast<double>(l.cp - 1) * (passes + 2) * own;
  }
  // Ranks of a sequence gather the experts that its tokens chose, 4 bytes each.
  if (job.model.limited && l.cp * l.tp > 1)
    (l.cp > 1 ? out.context : out.tensor) +=
        microbatches * routers * (1 + again) * 4 * static_cast<double>(job.model.chosen) * z.cut_tokens;
  if (l.pp > 1) {
    double messages = 0;
    for (std::int64_t c = 0; c < l.chunks; ++c) {
      const std::int64_t stage = stage_of(l, rank, c);
      const auto leaves = [&](std::int64_t to) {
        return to >= 0 && to < l.stages() && !(l.schedule == schedule_kind::zb_v && stage / l.pp != to / l.pp);
      };
      messages += (leaves(stage + 1) ? 1 : 0) + (leaves(stage - 1) ? 1 : 0);
    }
    out.pipeline = microbatches * messages * cut;
  }
  const double reductions = program.reduces_each_microbatch ? microbatches : 1;
  const auto reduced = [&](double parameters, std::int64_t ranks, std::int64_t copies) {
    if (ranks * copies == 1) return 0.0;
    double gradients = parameters * program.reduced_bytes;
    if (copies > 1 && !(l.zero == zero_level::optimizer && program.reduces_whole))
      gradients += gradients / static_cast<double>(ranks);
    const double pieces = parameters * program.weight_bytes / static_cast<double>(ranks);
    if (l.zero == zero_level::replicated) return gradients;
    if (l.zero == zero_level::optimizer) return gradients + pieces;
    return reductions * gradients + (l.zero == zero_level::parameters ? 2 * microbatches : 1) * pieces;
  };
  out.data = reduced(rank_parameters(job, l, rank), l.pieces(), l.copies()) +
             reduced(rank_experts(job, l, rank), l.expert_copies(), 1);
  if (is_tied_across(job, l) && (rank == 0 || rank == last_rank(l))) out.ends = tied_bytes(job, l);
  return out;
}

}  // namespace plait::planner
