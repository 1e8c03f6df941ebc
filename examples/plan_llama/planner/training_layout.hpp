// A layout as the planner's data: the extents of a mesh, a schedule and the policies of one training step. Also checks
// whether a layout is legal, and counts the layers of each rank of its pipeline.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/recompute.hpp"
#include "plait/plan/machine_time.hpp"
#include "plait/schedule/schedule.hpp"
#include "plan_llama/planner/transformer_shape.hpp"

namespace plait::planner {

/// The schedules that have formulas, by the names of schedule/parse.hpp.
enum class schedule_kind : std::uint8_t { gpipe, one_f_one_b, interleaved, zb_h1, zb_h2, zb_v, automatic };
inline constexpr int schedule_kinds = 7;

constexpr const char* name_of(schedule_kind kind) {
  constexpr const char* names[] = {"gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "automatic"};
  return names[static_cast<std::size_t>(kind)];
}

/// How keys and values reach the ranks that share a sequence.
enum class context_kind : std::uint8_t { ring, all_gather_kv, ulysses };
inline constexpr int context_kinds = 3;

constexpr const char* name_of(context_kind kind) {
  constexpr const char* names[] = {"ring", "all_gather_kv", "ulysses"};
  return names[static_cast<std::size_t>(kind)];
}

/// The ranks over which ZeRO's pieces are equal (`data_axes::replicate`) in a hybrid, which shards within and
/// replicates over. A part of dp means its outer ranks, which are a separate axis of the mesh.
enum class replication : std::uint8_t { none, over_dp, over_cp, over_part_of_dp };

/// A training job, without its layout.
struct training_job {
  transformer_shape model;
  std::int64_t seq = 0;           ///< tokens of a sequence
  std::int64_t global_batch = 0;  ///< sequences of a step
  software program{};

  double tokens() const { return static_cast<double>(seq) * static_cast<double>(global_batch); }
  /// Returns the training of a model all of whose blocks are like the first ones.
  training_job of_first_blocks() const {
    training_job job = *this;
    job.model = model.of_first_blocks();
    return job;
  }
};

/// A mesh with the policies of a step. The order of axes, from the inner, is tp, cp, dp and pp (Megatron's order). With
/// `pipeline_inside`, pp comes before dp.
struct training_layout {
  std::int64_t tp = 1, cp = 1, pp = 1, dp = 1;
  std::int64_t ep = 1;  ///< ranks over which experts are sharded
  /// True: the ranks of ep are neighbours, of tp, cp and dp together, and experts are whole. False: they are the
  /// innermost ranks of dp, a separate axis of the mesh, and tp cuts each expert.
  bool folds_experts = false;
  bool pipeline_inside = false;
  std::int64_t microbatch = 1;  ///< sequences
  schedule_kind schedule = schedule_kind::one_f_one_b;
  std::int64_t chunks = 1;  ///< stages of a rank
  plait::recompute recompute = plait::recompute::none;
  std::int64_t recompute_every = 1;  ///< with `full`: layers k, 2 k, ... recompute, and the others keep everything
  zero_level zero = zero_level::optimizer;
  replication replicate = replication::none;
  std::int64_t dp_copies = 1;     ///< of each piece, with `over_part_of_dp`
  bool sequence_parallel = true;  ///< tensors that tensor parallelism leaves whole are cut along the sequence over tp
  context_kind context = context_kind::ring;
  bool offload_activations = false;  ///< kept activations are in host memory between passes
  bool offload_optimizer = false;    ///< moments and master copies are in host memory
  std::int64_t loss_chunks = 1;      ///< of a rank's tokens, each with its own pass of head and loss

  std::int64_t ranks() const { return tp * cp * pp * dp; }
  std::int64_t stages() const { return pp * chunks; }
  bool cuts_sequence() const { return sequence_parallel && tp > 1; }
  /// Positions of a sequence on a rank between blocks.
  std::int64_t positions(const training_job& job) const { return job.seq / (cp * (cuts_sequence() ? tp : 1)); }
  /// Microbatches of a rank in a step.
  std::int64_t microbatches(const training_job& job) const { return job.global_batch / (dp * microbatch); }

  axis_place tp_axis() const { return {tp, 1}; }
  axis_place cp_axis() const { return {cp, tp}; }
  /// Ranks of dp that lie within a stage in both orders: those of an axis ep.
  std::int64_t near_dp() const { return folds_experts ? 1 : ep; }
  /// The other ranks of dp.
  axis_place dp_axis() const { return {dp / near_dp(), tp * cp * near_dp() * (pipeline_inside ? pp : 1)}; }
  /// Ranks of dp and cp that hold the same piece of cut state.
  std::int64_t copies() const {
    return replicate == replication::none      ? 1
           : replicate == replication::over_dp ? dp
           : replicate == replication::over_cp ? cp
                                               : dp_copies;
  }
  /// Ranks of dp and cp over which a level of ZeRO cuts.
  std::int64_t pieces() const { return dp * cp / copies(); }
  /// The ranks of cp, and of dp, that hold the same piece, and those over which it is cut.
  axis_place copies_axis() const {
    if (replicate == replication::over_cp) return cp_axis();
    return {copies(), dp_axis().stride * (dp / copies())};
  }
  axis_place cut_cp_axis() const { return {(replicate == replication::over_cp ? 1 : cp) * near_dp(), tp}; }
  axis_place cut_dp_axis() const {
    return {(replicate == replication::over_cp ? dp : dp / copies()) / near_dp(), dp_axis().stride};
  }
  /// The ranks over which experts are sharded: neighbours, or ranks of dp beyond other stages.
  axis_place ep_axis() const {
    if (!folds_experts) return {ep, tp * cp};
    return {pipeline_inside ? std::gcd(ep, tp * cp) : ep, 1};
  }
  axis_place ep_over_dp() const { return {ep / ep_axis().extent, dp_axis().stride}; }
  /// The number of ranks over which a layer's experts are spread.
  std::int64_t expert_pieces() const { return folds_experts ? ep : ep * tp; }
  /// The number of ranks that hold the same piece of experts, and their place.
  std::int64_t expert_copies() const { return tp * cp * dp / expert_pieces(); }
  axis_place expert_copies_axis() const {
    if (!folds_experts) return cp_axis();
    const std::int64_t near = ep_axis().extent;
    return {pipeline_inside ? tp * cp / near : expert_copies(), near};
  }
  axis_place expert_copies_over_dp() const {
    if (!folds_experts) return dp_axis();
    const std::int64_t far = ep_over_dp().extent;
    return {pipeline_inside ? dp / far : 1, dp_axis().stride * far};
  }
  axis_place pp_axis() const { return {pp, tp * cp * (pipeline_inside ? near_dp() : dp)}; }

  friend bool operator==(const training_layout&, const training_layout&) = default;
};

/// Whether a schedule can have this number of chunks on a rank: 1, 2 for a vee, and any number for `interleaved`.
constexpr bool legal_chunks(schedule_kind kind, std::int64_t chunks) {
  if (kind == schedule_kind::interleaved) return chunks >= 2 && chunks <= max_chunks;
  return chunks == (kind == schedule_kind::zb_v ? 2 : 1);
}

namespace detail {

/// Returns the nearest divisors of `whole` around `value` as text: "12 and 16".
inline std::string nearest_divisors(std::int64_t whole, std::int64_t value) {
  std::int64_t below = 0, above = 0;
  for (std::int64_t d = 1; d <= whole && (d <= value || above == 0); ++d)
    if (whole % d == 0) (d < value ? below : above) = d;
  if (below == 0 || above == 0) return cat({below + above});
  return cat({below, " and ", above});
}

}  // namespace detail

/// The first check that a layout fails, if any. A layout that fails a later check is nearer to a legal one.
struct layout_refusal {
  int passed = 0;     ///< checks before it
  std::string why{};  ///< has the flag and the nearest legal values; empty: the layout passes all checks
};

namespace detail {

/// Returns why a layout cannot have its copies of pieces; empty if it can.
inline std::string why_no_hybrid(const training_layout& l, const training_job& job) {
  if (l.replicate == replication::none) return {};
  const char* axis = l.replicate == replication::over_cp ? "cp" : "dp";
  const std::int64_t ranks = l.replicate == replication::over_cp ? l.cp : l.dp;
  if (l.zero == zero_level::replicated)
    return cat({"replicate is ", axis, " and zero 0, which cuts nothing; legal are zero 1 to 3, and replicate none"});
  if (job.model.experts > 0)
    return cat({"replicate is ", axis, " in a model of experts, whose hybrids are not priced; legal is none"});
  if (ranks == 1) return cat({"replicate is ", axis, ", an axis of one rank; legal is none"});
  if (l.replicate == replication::over_part_of_dp && (l.dp_copies < 1 || l.dp % l.dp_copies != 0))
    return cat({"replicate is dp:", l.dp_copies, " and dp ", l.dp, ", which it must divide; the nearest are ",
                nearest_divisors(l.dp, l.dp_copies)});
  if (l.pieces() == 1)
    return cat({"replicate is ", axis, ", and with dp = ", l.dp, " and cp = ", l.cp,
                " there is one rank left to cut over; legal is none, with zero 0"});
  return {};
}

}  // namespace detail

namespace detail {

/// Returns why the loss of a layout cannot be computed in chunks; empty if it can.
inline std::string why_no_loss_chunks(const training_layout& l, const training_job& job) {
  if (l.loss_chunks == 1) return {};
  const auto refuse = [&](const std::string& why) { return cat({"loss_chunks is ", l.loss_chunks, " and ", why}); };
  if (!job.program.chunks_loss)
    return refuse(cat({"the program ", job.program.name, "; legal is 1, and more for the program plait"}));
  if (l.loss_chunks > l.positions(job))
    return refuse(cat({"a rank has ", l.positions(job), " positions of a sequence; legal is at most as many"}));
  using enum schedule_kind;
  if (l.pp > 1 && l.schedule != gpipe && l.schedule != one_f_one_b && l.schedule != schedule_kind::interleaved)
    return refuse(cat({"the schedule ", name_of(l.schedule),
                       " defers weight gradients, for which the gradients of all logits wait; legal is 1, or gpipe, "
                       "1f1b or interleaved"}));
  return {};
}

/// Returns why a layout's offload has no price; empty if it has one.
inline std::string why_no_offload(const training_layout& l, const training_job& job) {
  if ((l.offload_activations || l.offload_optimizer) && !job.program.offloads)
    return cat({"offload is for the program plait, and the program is ", job.program.name, "; legal is none"});
  if (!l.offload_activations) return {};
  if (job.model.experts > 0)  // activations of experts stay on the device
    return "offload of activations in a model of experts is not priced; legal are offload none and optimizer";
  if (l.pp > 1 && l.schedule == schedule_kind::automatic)
    return "offload of activations with schedule automatic is not priced; legal are offload none and optimizer";
  const std::int64_t m = l.microbatches(job);
  if (m > max_microbatches || l.pp > max_pipeline_ranks)
    return cat({"offload of activations is simulated, here of ", l.pp, " ranks and ", m,
                " microbatches; legal are at most ", max_pipeline_ranks, " and ", max_microbatches});
  return {};
}

}  // namespace detail

/// Checks the level of ZeRO and the copies of a hybrid, after all checks of the mesh and the schedule.
inline layout_refusal refusal_of_data(const training_layout& l, const training_job& job) {
  if (l.zero == zero_level::parameters && l.pp > 1)
    return {18,
            "zero is 3 and pp above 1: every microbatch would gather the parameters again; use zero 1 or 2, or pp = 1"};
  if (std::string e = detail::why_no_hybrid(l, job); !e.empty()) return {19, e};
  return {};
}

/// Returns a number of ranks over which a layout can shard experts: its divisors are legal, too.
inline std::int64_t legal_expert_ranks(const training_layout& l, const transformer_shape& m) {
  return std::gcd(std::max<std::int64_t>(1, m.experts), l.folds_experts ? l.tp * l.cp * l.dp : l.dp);
}

/// Returns why a layout cannot train `job`, if it cannot. It does not check memory.
inline layout_refusal refusal_of(const training_layout& l, const training_job& job) {
  const transformer_shape& m = job.model;
  int check = 0;
  for (const auto& [name, value] : {std::pair{"tp", l.tp},
                                    {"cp", l.cp},
                                    {"pp", l.pp},
                                    {"dp", l.dp},
                                    {"microbatch", l.microbatch},
                                    {"seq", job.seq},
                                    {"batch", job.global_batch}}) {
    if (value < 1) return {check, cat({name, " is ", value, "; legal is 1 or more"})};
    ++check;
  }
  constexpr double most_ranks = 1e9;
  if (static_cast<double>(l.tp) * static_cast<double>(l.cp) * static_cast<double>(l.pp) * static_cast<double>(l.dp) >
      most_ranks)
    return {6, "tp, cp, pp and dp together are more than 1000000000 ranks, which is more than anybody has"};
  if (m.heads % l.tp != 0)
    return {7, cat({"tp is ", l.tp, " and the model has ", m.heads, " heads, which it must divide; the nearest are ",
                    detail::nearest_divisors(m.heads, l.tp)})};
  const std::int64_t most_ep = legal_expert_ranks(l, m);
  if (l.ep < 1 || most_ep % l.ep != 0)
    return {8, cat({"ep is ", l.ep, ", the model has ", m.experts, " experts and ",
                    l.folds_experts ? "tp, cp and dp together " : "dp ", l.folds_experts ? l.tp * l.cp * l.dp : l.dp,
                    " ranks, which it must both divide; legal is 1, and here ", most_ep, " and what divides that"})};
  if (m.experts > 0 && l.tp > 1 && !l.cuts_sequence())
    return {8, "experts with tp above 1 and sequence_parallel 0 are not priced; use sequence_parallel 1"};
  for (const auto& [name, width] : {std::pair{"ffn", m.experts > 0 && l.folds_experts ? 0 : m.ffn},
                                    std::pair{"shared_ffn", m.shared_ffn}, std::pair{"first_ffn", m.first_ffn}})
    if (width % l.tp != 0)
      return {8, cat({"tp is ", l.tp, " and ", name, " ", width, ", which it must divide; the nearest are ",
                      detail::nearest_divisors(width, l.tp)})};
  if (m.kv_heads % l.tp != 0 && l.tp % m.kv_heads != 0)
    return {9, cat({"tp is ", l.tp, " and the model has ", m.kv_heads,
                    " heads of keys; one must divide the other, so that each is on one rank or whole on several"})};
  if (l.recompute_every < 1 || (l.recompute_every > 1 && l.recompute != plait::recompute::full))
    return {10, cat({"recompute_every is ", l.recompute_every, "; legal is 1, and more with full recomputation"})};
  const std::int64_t pieces =
      l.cp * (l.cuts_sequence() ? l.tp : 1) * (l.cp > 1 && l.context == context_kind::ring ? 2 : 1);
  if (job.seq % pieces != 0)
    return {11, cat({"seq is ", job.seq, " and is cut into ", pieces, " pieces by cp = ", l.cp,
                     l.cuts_sequence() ? cat({" and tp = ", l.tp}) : std::string(), "; the nearest legal are ",
                     job.seq / pieces * pieces, " and ", (job.seq / pieces + 1) * pieces})};
  if (l.context == context_kind::ulysses && (m.heads / l.tp) % l.cp != 0)
    return {12, cat({"cp is ", l.cp, " and a rank has ", m.heads / l.tp,
                     " heads, which ulysses divides over ranks; the nearest are ",
                     detail::nearest_divisors(m.heads / l.tp, l.cp)})};
  const std::int64_t kv_heads = std::max<std::int64_t>(1, m.kv_heads / l.tp);
  if (l.context == context_kind::ulysses && kv_heads % l.cp != 0 && l.cp % kv_heads != 0)
    return {12, cat({"cp is ", l.cp, " and a rank has ", kv_heads,
                     " heads of keys, which ulysses divides over ranks; one must divide the other"})};
  const std::int64_t most = m.layers + (job.program.bare_ends ? 2 : 0);
  if (l.stages() > most)
    return {13, cat({"pp is ", l.pp, " with ", l.chunks, " chunks on a rank: ", l.stages(), " stages for ", m.layers,
                     " layers; use at most ", most, " stages"})};
  if (!legal_chunks(l.schedule, l.chunks))
    return {14, cat({"chunks is ", l.chunks, " and the schedule ", name_of(l.schedule), "; legal is ",
                     l.schedule == schedule_kind::interleaved ? cat({"2 to ", max_chunks})
                                                              : cat({l.schedule == schedule_kind::zb_v ? 2 : 1})})};
  if (l.pp == 1 && l.chunks > 1)
    return {15, cat({"pp is 1 with ", l.chunks, " chunks on a rank; without a pipeline a rank has one chunk"})};
  if (l.microbatch > std::numeric_limits<std::int64_t>::max() / 2 / l.dp)
    return {16, cat({"microbatch is ", l.microbatch, " sequences on each of ", l.dp, " ranks of dp, and the batch has ",
                     job.global_batch, "; use at most ", std::max<std::int64_t>(1, job.global_batch / l.dp)})};
  const std::int64_t share = l.dp * l.microbatch;
  if (job.global_batch % share != 0)
    return {16, cat({"batch is ", job.global_batch, " sequences and dp ", l.dp, " ranks take microbatches of ",
                     l.microbatch, "; the nearest legal batches are ",
                     job.global_batch < share
                         ? cat({share})
                         : cat({job.global_batch / share * share, " and ", (job.global_batch / share + 1) * share})})};
  const std::int64_t m_count = l.microbatches(job);
  if (l.schedule == schedule_kind::interleaved && m_count % l.pp != 0)
    return {17, cat({"interleaved needs microbatches in multiples of pp = ", l.pp, " and a rank has ", m_count,
                     "; the nearest legal batches are ", m_count < l.pp ? share * l.pp : m_count / l.pp * l.pp * share,
                     " and ", (m_count / l.pp + 1) * l.pp * share})};
  if (std::string e = detail::why_no_offload(l, job); !e.empty()) return {17, e};
  if (std::string e = detail::why_no_loss_chunks(l, job); !e.empty()) return {17, e};
  return refusal_of_data(l, job);
}

/// Returns why a layout cannot train `job`, with the flag and the nearest legal values; empty if it can.
inline std::string why_illegal(const training_layout& l, const training_job& job) { return refusal_of(l, job).why; }

/// An even split of layers over stages. Remaining layers go to the stages in the middle, then to the first stage, and
/// at last to the last one: these two also have an embedding and an output projection. The planner prices 10^5 layouts,
/// so it does not search a split that balances costs, as parallel/placement.hpp does.
struct stage_split {
  std::int64_t stages = 1, base = 1, rest = 0;

  constexpr stage_split(std::int64_t layers, std::int64_t n) : stages(n), base(layers / n), rest(layers % n) {}

  /// Returns the number of layers of one stage.
  constexpr std::int64_t of_stage(std::int64_t stage) const {
    if (stage == stages - 1) return base;  // the rest is less than the number of stages
    if (stage == 0) return base + (rest == stages - 1 && stages > 1 ? 1 : 0);
    return base + (stage <= rest ? 1 : 0);
  }
};

/// The numbers of blocks of a stage or of a rank: usual ones, and first ones of a model with experts.
struct block_counts {
  std::int64_t alike = 0, first = 0;

  constexpr std::int64_t all() const { return alike + first; }
  bool operator==(const block_counts&) const = default;
};
constexpr block_counts blocks_of_stage(const transformer_shape& m, std::int64_t stages, std::int64_t stage) {
  const stage_split split{m.layers, stages};
  const std::int64_t here = split.of_stage(stage);
  std::int64_t left = m.dense_layers;
  for (std::int64_t s = 0; s < stage && left > 0; ++s) left -= split.of_stage(s);
  const std::int64_t first = left < 0 ? 0 : left < here ? left : here;
  return {here - first, first};
}

/// Returns the stage of a rank's chunk: chunk c of rank r is stage c pp + r, and on the way back of a vee 2 pp - 1 - r.
constexpr std::int64_t stage_of(const training_layout& l, std::int64_t rank, std::int64_t chunk) {
  if (l.schedule == schedule_kind::zb_v && chunk == 1) return 2 * l.pp - 1 - rank;
  return chunk * l.pp + rank;
}

constexpr block_counts blocks_of_rank(const training_layout& l, const transformer_shape& m, std::int64_t rank) {
  block_counts sum;
  for (std::int64_t c = 0; c < l.chunks; ++c) {
    const block_counts here = blocks_of_stage(m, l.stages(), stage_of(l, rank, c));
    sum.alike += here.alike, sum.first += here.first;
  }
  return sum;
}

/// Returns the rank of the pipeline that has the output projection: the last, or in a vee the first.
constexpr std::int64_t last_rank(const training_layout& l) { return l.schedule == schedule_kind::zb_v ? 0 : l.pp - 1; }

}  // namespace plait::planner
