// Schedules as data. A pipeline schedule is the order of each rank's passes. A step schedule has passes by parameter
// units, messages, and the entries of data parallelism: gathers, releases, reductions, the norm and updates. It may
// also have copies of activations to the host's memory and back. The costs of both are here too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/version.hpp"

namespace plait {

/// The limits of a schedule's sizes, which `pipeline_shape::legal` checks. An action stores limited numbers of chunks
/// and microbatches. Ranks and *cells* (a microbatch in a stage) are limited so that no product of sizes overflows an
/// int. Illegal sizes are refused before memory is allocated. Checking and simulating a schedule takes some hundred
/// bytes per cell.
inline constexpr int max_pipeline_ranks = 1024, max_chunks = 255, max_microbatches = 65535, max_cells = 1 << 22;

/// These limits as text, for messages.
#define PLAIT_SCHEDULE_SIZES                                                                                \
  "the shape of a pipeline needs 1 to 1024 ranks, 1 to 255 chunks on each and 1 to 65535 microbatches, of " \
  "which the product is at most 4194304"

/// The placement of a model's stages on the ranks of its pipeline.
///
/// * `straight`: stage = chunk * ranks + rank. The model passes the ranks in one direction, once per chunk
///   (arXiv 2104.04473).
/// * `vee`: odd chunks run backwards, so that the last stage of one chunk and the first of the next are on one rank
///   (the V schedules of arXiv 2405.15362, DualPipeV).
enum class stage_placement : std::uint8_t { straight, vee };

/// The sizes of a pipeline, and the placement of its stages. Stages are numbered in the order of a forward pass.
///
///     constexpr pipeline_shape shape{.ranks = 4, .chunks = 2, .microbatches = 16, .placement = stage_placement::vee};
///     static_assert(shape.stages() == 8 && shape.stage_of(3, 1) == 4 && shape.rank_of(7) == 0);
struct pipeline_shape {
  int ranks = 1;         ///< p: extent of the pipeline axis
  int chunks = 1;        ///< v: stages on each rank
  int microbatches = 1;  ///< m, per step
  stage_placement placement = stage_placement::straight;

  constexpr int stages() const { return ranks * chunks; }
  constexpr int stage_of(int rank, int chunk) const {
    return chunk * ranks + (runs_backwards(chunk) ? ranks - 1 - rank : rank);
  }
  constexpr int chunk_of(int stage) const { return stage / ranks; }
  constexpr int rank_of(int stage) const {
    const int place = stage % ranks;
    return runs_backwards(chunk_of(stage)) ? ranks - 1 - place : place;
  }

  /// Whether the sizes are within the limits. All other members and functions of a shape require it.
  constexpr bool legal() const {
    return ranks >= 1 && ranks <= max_pipeline_ranks && chunks >= 1 && chunks <= max_chunks && microbatches >= 1 &&
           microbatches <= max_microbatches && std::int64_t{ranks} * chunks * microbatches <= max_cells;
  }

  friend constexpr bool operator==(const pipeline_shape&, const pipeline_shape&) = default;

 private:
  constexpr bool runs_backwards(int chunk) const { return placement == stage_placement::vee && chunk % 2 == 1; }
};

namespace detail {

/// Throws `error`, which begins with `who`, unless the sizes are legal.
constexpr void require_legal(const char* who, const pipeline_shape& shape) {
  if (!shape.legal())
    fail({who, " (", shape.ranks, " ranks, ", shape.chunks, " chunks each, ", shape.microbatches,
          " microbatches): " PLAIT_SCHEDULE_SIZES});
}

}  // namespace detail

/// The kind of a rank's computation for one microbatch in one of its chunks of the model.
///
/// A *backward* is either one action, B, or two (arXiv 2401.10241). I computes the gradient of the chunk's input, for
/// which the previous stage waits. W computes the gradients of the weights, for which no stage waits.
enum class action_kind : std::uint8_t { forward, backward, input_backward, weight_backward };

/// F, B, I or W.
constexpr char letter(action_kind kind) { return "FBIW"[static_cast<std::size_t>(kind)]; }

/// True for B and I, which compute the gradient for the previous stage.
constexpr bool gives_input_gradient(action_kind kind) {
  return kind == action_kind::backward || kind == action_kind::input_backward;
}
/// True for B and W, after which the microbatch's activations are no longer needed.
constexpr bool frees_activations(action_kind kind) {
  return kind == action_kind::backward || kind == action_kind::weight_backward;
}

/// The stage whose result an action of `stage` needs: a forward needs the previous stage, B and I need the next stage.
/// -1: none.
constexpr int source_of(const pipeline_shape& shape, action_kind kind, int stage) {
  if (kind == action_kind::forward) return stage - 1;
  return gives_input_gradient(kind) && stage + 1 < shape.stages() ? stage + 1 : -1;
}
/// The stage that needs the result of an action of `stage`; -1: none.
constexpr int target_of(const pipeline_shape& shape, action_kind kind, int stage) {
  if (kind == action_kind::forward) return stage + 1 < shape.stages() ? stage + 1 : -1;
  return gives_input_gradient(kind) ? stage - 1 : -1;
}

/// One pass in a schedule. `pipeline_shape` gives the stage of a chunk.
struct action {
  action_kind kind = action_kind::forward;
  std::uint8_t chunk = 0;        ///< index among the rank's own chunks, 0 to v - 1
  std::uint16_t microbatch = 0;  ///< 0 to m - 1

  friend constexpr bool operator==(const action&, const action&) = default;
};
static_assert(sizeof(action) == 4);

constexpr action forward_of(int chunk, int microbatch) {
  return {action_kind::forward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action backward_of(int chunk, int microbatch) {
  return {action_kind::backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action input_backward_of(int chunk, int microbatch) {
  return {action_kind::input_backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}
constexpr action weight_backward_of(int chunk, int microbatch) {
  return {action_kind::weight_backward, static_cast<std::uint8_t>(chunk), static_cast<std::uint16_t>(microbatch)};
}

/// "F3.1": the forward of microbatch 3 in chunk 1.
inline std::string describe(const action& a) { return cat({letter(a.kind), a.microbatch, ".", a.chunk}); }

static_assert(forward_of(max_chunks, 0).chunk == max_chunks && forward_of(0, max_microbatches).microbatch == 65535,
              "an action has room for every legal chunk and microbatch");

using schedule_name = fixed_text<32>;

/// A pipeline schedule as data: the order of each rank's computations. Its messages (schedule/expand.hpp), times
/// (schedule/simulate.hpp) and legality (schedule/verify.hpp) are derived from it.
///
///     schedule s = parse_schedule("interleaved:2", ranks, microbatches);  // or interleaved<2>::make(...), or your own
///     require_verified(s);                                                // complete, ordered, free of deadlock
///     auto programs = rank_program(s, costs);                 // each rank's computations, sends and receives
///     for (const step_entry& step : programs[my_rank]) ...  // an executor
///
/// It can be used in constant expressions, but must not outlive them.
struct schedule {
  schedule_name name;
  pipeline_shape shape;
  std::vector<std::vector<action>> order;  ///< of each rank, first to last
};

/// A message to the next stage (an activation) or to the previous stage (its gradient).
enum class transfer_kind : std::uint8_t { activation, gradient };

/// One message between two ranks. Stages on one rank pass results in place, without a transfer.
struct transfer {
  transfer_kind kind = transfer_kind::activation;
  int from_stage = 0;
  int to_stage = 0;
  int microbatch = 0;

  friend constexpr bool operator==(const transfer&, const transfer&) = default;
};

/// "activation 3: stage 1 -> 2"
inline std::string describe(const transfer& t) {
  return cat({t.kind == transfer_kind::activation ? "activation " : "gradient ", t.microbatch, ": stage ", t.from_stage,
              " -> ", t.to_stage});
}

/// The kinds of entries. Gathers, reductions, sends and receives only start at their place. An entry that needs one
/// waits for it: a pass for its input and its unit's gather, the norm and updates for reductions.
///
/// In a hybrid a reduction has two parts. `reduce` sums a unit's gradient over the ranks that shard it. `reduce_copies`
/// waits for that, and sums a rank's piece over the ranks with copies of it. If stages share parameters, `reduce_ties`
/// is the last part: it waits for the others, and sums over these stages.
///
/// Three kinds move the values that a unit keeps of a microbatch. `offload` starts their copy to the host's memory.
/// `drop` waits for that copy and frees the device's memory. `reload` allocates memory on the device and starts the
/// copy back; the unit's backward pass waits for it.
enum class step_op : std::uint8_t {
  pass,
  send,
  receive,
  gather,
  release,
  reduce,
  norm,
  update,
  reduce_copies,
  reduce_ties,
  offload,
  drop,
  reload
};

/// Whether an entry moves activations between the device and the host.
constexpr bool moves_activations(step_op op) { return op >= step_op::offload; }

/// One entry of a rank's program. A pipeline's program has sends, receives and passes of whole stages. A step's program
/// has passes by units, and the other kinds too.
struct step_entry {
  step_op op = step_op::pass;
  int unit = -1;         ///< of all kinds except messages and the norm; -1: a whole stage
  plait::action pass{};  ///< of a pass: its action; of an offload, drop or reload: the forward pass that keeps the
                         ///< values
  plait::transfer transfer{};  ///< of a send or a receive

  friend constexpr bool operator==(const step_entry&, const step_entry&) = default;
};

/// "F3.1", "F3.1 of unit 5", "gather of unit 5", "send activation 3: stage 1 -> 2", "the norm", "drop of F3.1 of unit
/// 5"
std::string describe(const step_entry& e);
#ifndef PLAIT_COMPILED
PLAIT_INLINE std::string describe(const step_entry& e) {
  if (e.op == step_op::pass) return e.unit < 0 ? describe(e.pass) : cat({describe(e.pass), " of unit ", e.unit});
  if (e.op == step_op::send) return "send " + describe(e.transfer);
  if (e.op == step_op::receive) return "receive " + describe(e.transfer);
  if (e.op == step_op::norm) return "the norm";
  constexpr const char* names[] = {
      "pass",      "send",    "receive", "gather", "release", "reduction", "norm", "update", "reduction of the copies",
      "reduction", "offload", "drop",    "reload"};
  if (moves_activations(e.op))
    return cat({names[static_cast<std::size_t>(e.op)], " of ", describe(e.pass), " of unit ", e.unit});
  const char* const stages = e.op == step_op::reduce_ties ? " over tied stages" : "";
  return cat({names[static_cast<std::size_t>(e.op)], " of unit ", e.unit, stages});
}
#endif

/// Parameters that are gathered, reduced and updated together; by default those of a block, the embedding or the head.
/// A forward pass of a stage runs its units in order, a backward pass in reverse order.
struct step_unit {
  int stage = 0;                ///< the stage whose passes use it
  std::int64_t parameters = 0;  ///< elements on a rank when they are gathered over the data axes
  bool trainable = true;
  /// The unit of another rank's stage that shares this unit's parameters, such as a tied embedding; -1: none. The two
  /// units sum their reduced gradients.
  int tied_to = -1;
  /// Another unit of this rank whose parameters its passes also use, such as the embedding's for a head; -1: none.
  int uses = -1;
  double kept_bytes = 0;  ///< bytes that a forward pass keeps of one microbatch, on a rank; 0: unknown
};

/// The state that is sharded over the data axes (ZeRO, arXiv 1910.02054): nothing; the optimizer state; also the
/// reduced gradients; also the parameters between their uses.
enum class zero_level : std::uint8_t { replicated, optimizer, gradients, parameters };

/// A policy of data parallelism as data: how a unit's parameters, gradients and optimizer state are distributed, and
/// how early its communication starts.
struct data_parallel {
  zero_level level = zero_level::replicated;
  /// Level `parameters`: how many uses in advance a unit's gather starts; 0: at its use.
  int prefetch = 1;
  /// Level `parameters`: whether a unit is released after a forward pass and gathered again for the backward pass.
  bool reshard_after_forward = true;
  /// Whether a unit's reduction starts directly after its last gradient; else all start after the last pass.
  bool overlap = true;
  /// Whether every update needs the norm of all gradients, for clipping.
  bool clip = true;
  /// Levels above `replicated`: whether several ranks have equal pieces, so reduced pieces are also summed over those
  /// ranks. A pipeline derives it from its `data_axes::replicate`.
  bool hybrid = false;
};

/// Returns one unit for each stage.
constexpr std::vector<step_unit> units_of_stages(const pipeline_shape& shape, bool trainable = true) {
  std::vector<step_unit> all(static_cast<std::size_t>(shape.stages()));
  for (std::size_t stage = 0; stage < all.size(); ++stage) {
    all[stage].stage = static_cast<int>(stage);
    all[stage].trainable = trainable;
  }
  return all;
}

/// The units whose parameters a pass of unit `u` uses: itself, and a unit with which it shares parameters.
struct used_units {
  int unit[2] = {-1, -1};
  constexpr const int* begin() const { return unit; }
  constexpr const int* end() const { return unit + (unit[1] < 0 ? 1 : 2); }
};

/// A whole step: the entries of every pipeline rank, in order. Ranks along the data axes run equal programs.
struct step_schedule {
  pipeline_shape shape;
  data_parallel policy;
  std::vector<step_unit> units;                   ///< of all stages, in the order of a forward pass
  std::vector<std::vector<step_entry>> programs;  ///< of each rank of the pipeline

  /// The most units whose whole gradients wait for a reduction that has begun while a pass adds to other gradients.
  /// Later ones wait for the oldest, whose whole gradient is then freed. Fewer would wait for a reduction that could
  /// run beside a pass.
  static constexpr std::size_t most_reducing = 2;
  /// Whether `most_reducing` holds. With several microbatches all whole gradients exist before a reduction begins.
  constexpr bool limits_reducing() const { return policy.level >= zero_level::gradients && shape.microbatches == 1; }
  /// Whether parameters are gathered between steps.
  constexpr bool gathered_between_steps() const { return policy.level != zero_level::parameters; }
  constexpr used_units used_by(int unit) const { return {{unit, units[static_cast<std::size_t>(unit)].uses}}; }
  constexpr int rank_of(int unit) const { return shape.rank_of(units[static_cast<std::size_t>(unit)].stage); }
  /// The last part of a unit's reduction. Its update and the norm wait for it.
  constexpr step_op last_reduction(int unit) const {
    if (units[static_cast<std::size_t>(unit)].tied_to >= 0) return step_op::reduce_ties;
    return policy.hybrid ? step_op::reduce_copies : step_op::reduce;
  }
};

/// Whether a pass adds to the gradient of its unit.
constexpr bool adds_gradient(action_kind kind) {
  return kind == action_kind::backward || kind == action_kind::weight_backward;
}
/// Whether a schedule has backward passes.
constexpr bool trains(const schedule& s) {
  for (const auto& order : s.order)
    for (const action& a : order)
      if (a.kind != action_kind::forward) return true;
  return false;
}
/// Whether a pass reads the parameters of its unit. The gradients of weights only need activations.
constexpr bool reads_parameters(action_kind kind) { return kind != action_kind::weight_backward; }

/// Times of one microbatch's actions, in any unit.
struct action_times {
  double forward = 1;
  double backward = 2;  ///< both halves together
  double input_backward = 1;
  double weight_backward = 1;

  constexpr double of(action_kind kind) const {
    const double all[] = {forward, backward, input_backward, weight_backward};
    return all[static_cast<std::size_t>(kind)];
  }
};

namespace detail {

/// The time of a message between two ranks: that of the pair in `links`, or `link` if `links` is empty.
constexpr double link_time(const pipeline_shape& shape, int from, int to, double link,
                           const std::vector<double>& links) {
  if (from == to) return 0;
  return links.empty() ? link : links[static_cast<std::size_t>(from * shape.ranks + to)];
}

}  // namespace detail

/// The costs of actions and messages. The defaults are the unit costs of the literature: F = I = W = 1, B = 2, and
/// communication takes no time.
struct schedule_costs {
  /// Times of one microbatch in *all* chunks of a rank; each of v chunks takes a fraction 1/v. So schedules with
  /// different numbers of chunks are compared for the same model.
  action_times rank_part{};
  /// The times of each stage, one entry per stage, which replace `rank_part`; empty: none.
  std::vector<action_times> stages{};
  /// Time from the end of a send's action until the receiver may start. The sender continues meanwhile.
  double link = 0;
  /// The time for each pair of ranks, [from * ranks + to], which replaces `link`; empty: none.
  std::vector<double> links{};

  constexpr double of(const pipeline_shape& shape, action_kind kind, int stage) const {
    return stages.empty() ? rank_part.of(kind) / shape.chunks : stages[static_cast<std::size_t>(stage)].of(kind);
  }
  constexpr double of_link(const pipeline_shape& shape, int from, int to) const {
    return detail::link_time(shape, from, to, link, links);
  }
};

struct timed_entry {
  step_entry entry;
  double start = 0, end = 0;
  double waited = 0;  ///< the rank's idle time before it, for a message, a gather, reductions or other ranks
  int sequence = 0;   ///< simulated: as in `timed_action`
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
