// Verifies that a schedule or a step is complete, ordered, within its memory limit and free of deadlock.
// schedule/verified.hpp does so for a policy in a `static_assert`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/schedule/errors.hpp"
#include "plait/schedule/expand.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

// The messages of a pipeline: whether the order in which ranks post them can deadlock.

/// The outcome of a check with its facts: the first wrong action or message, and its place.
struct schedule_verdict {
  schedule_error code = schedule_error::ok;
  int rank = -1;            ///< -1: none in particular
  int position = -1;        ///< in the rank's order (actions) or program (steps), from 0; -1: none
  step_entry step{};        ///< the entry at this place, or the missing entry
  int other_rank = -1;      ///< the rank for which it waits
  int other_position = -1;  ///< where that rank is stuck; -1: it has finished
  step_entry other_step{};
  int below = 0;  ///< nearest smaller legal number of microbatches (or limit on activations); 0: none
  int above = 0;  ///< nearest larger one; 0: none

  constexpr bool ok() const { return code == schedule_error::ok; }
};

/// The verdict as one line: "rank 2, action 5 (B3.0): a backward comes before ...".
std::string describe(const schedule_verdict& v);

/// The order in which a rank posts its messages, all in one queue, as on one NCCL communicator. A message completes
/// when it is at the head of the queues of its sender and its receiver (rendezvous). No network is stricter, so a
/// program that finishes here finishes everywhere. All rules except `global_list` use each rank's own order: receive an
/// action's input, compute, send its result.
///
/// Every receive names its sender. So if one run finishes, every run does (Siegel and Avrunin, Modeling wildcard-free
/// MPI programs for verification, 2005).
enum class posting_rule : std::uint8_t {
  blocking,     ///< one after another; no computation while a message waits
  one_queue,    ///< posted without blocking
  global_list,  ///< in the order of the transfers' simulated times on every rank, as `rank_program`
};

constexpr std::string_view name_of(posting_rule rule) {
  constexpr std::string_view names[] = {"blocking", "one_queue", "global_list"};
  return names[static_cast<std::size_t>(rule)];
}

namespace detail {

/// The message that an action needs, or the one that it makes. Returns false if there is none or it stays on the rank.
constexpr bool input_of(const pipeline_shape& shape, int rank, const action& a, transfer& t) {
  const int stage = shape.stage_of(rank, a.chunk), from = source_of(shape, a.kind, stage);
  if (from < 0 || shape.rank_of(from) == rank) return false;
  t = {a.kind == action_kind::forward ? transfer_kind::activation : transfer_kind::gradient, from, stage, a.microbatch};
  return true;
}
constexpr bool output_of(const pipeline_shape& shape, int rank, const action& a, transfer& t) {
  const int stage = shape.stage_of(rank, a.chunk), to = target_of(shape, a.kind, stage);
  if (to < 0 || shape.rank_of(to) == rank) return false;
  t = {a.kind == action_kind::forward ? transfer_kind::activation : transfer_kind::gradient, stage, to, a.microbatch};
  return true;
}

/// A distinct number for each message that a shape can have.
constexpr std::size_t slot_of(const pipeline_shape& shape, const transfer& t) {
  return (static_cast<std::size_t>(t.from_stage) * 2 + (t.kind == transfer_kind::gradient ? 1 : 0)) *
             static_cast<std::size_t>(shape.microbatches) +
         static_cast<std::size_t>(t.microbatch);
}
constexpr std::size_t slots(const pipeline_shape& shape) {
  return static_cast<std::size_t>(shape.stages()) * 2 * static_cast<std::size_t>(shape.microbatches);
}

/// The programs in each rank's own order: receive, compute, send.
constexpr std::vector<std::vector<step_entry>> program_in_own_order(const schedule& s) {
  std::vector<std::vector<step_entry>> programs(s.order.size());
  for (std::size_t r = 0; r < s.order.size(); ++r) {
    programs[r].reserve(s.order[r].size() * 3);
    for (const action& a : s.order[r]) {
      transfer t;
      if (input_of(s.shape, static_cast<int>(r), a, t)) programs[r].push_back({step_op::receive, -1, {}, t});
      programs[r].push_back({step_op::pass, -1, a});
      if (output_of(s.shape, static_cast<int>(r), a, t)) programs[r].push_back({step_op::send, -1, {}, t});
    }
  }
  return programs;
}

/// Checks that the right ranks receive each message once before the action that needs it, and send it once after the
/// action that makes it.
constexpr schedule_verdict check_steps(const pipeline_shape& shape,
                                       const std::vector<std::vector<step_entry>>& programs) {
  enum : unsigned char { made = 1, sent = 2, received = 4, used = 8 };
  std::vector<unsigned char> seen(slots(shape), 0);
  const auto at = [](schedule_error code, std::size_t r, std::size_t i, const step_entry& step) {
    return schedule_verdict{.code = code, .rank = static_cast<int>(r), .position = static_cast<int>(i), .step = step};
  };
  for (std::size_t r = 0; r < programs.size(); ++r) {
    const int rank = static_cast<int>(r);
    for (std::size_t i = 0; i < programs[r].size(); ++i) {
      const step_entry& step = programs[r][i];
      transfer t;
      if (step.op == step_op::pass) {
        if (step.pass.chunk >= shape.chunks) return at(schedule_error::unknown_chunk, r, i, step);
        if (step.pass.microbatch >= shape.microbatches) return at(schedule_error::unknown_microbatch, r, i, step);
        if (input_of(shape, rank, step.pass, t)) {
          unsigned char& flags = seen[slot_of(shape, t)];
          if ((flags & received) == 0) return at(schedule_error::transfer_missing, r, i, {step_op::receive, -1, {}, t});
          flags |= used;
        }
        if (output_of(shape, rank, step.pass, t)) seen[slot_of(shape, t)] |= made;
        continue;
      }
      t = step.transfer;
      const bool send = step.op == step_op::send;
      const schedule_error misplaced = send ? schedule_error::send_misplaced : schedule_error::receive_misplaced;
      const int step_to = t.kind == transfer_kind::activation ? 1 : -1;
      if (t.from_stage < 0 || t.from_stage >= shape.stages() || t.to_stage != t.from_stage + step_to ||
          t.to_stage < 0 || t.to_stage >= shape.stages() || t.microbatch < 0 || t.microbatch >= shape.microbatches ||
          shape.rank_of(send ? t.from_stage : t.to_stage) != rank ||
          shape.rank_of(t.from_stage) == shape.rank_of(t.to_stage))
        return at(misplaced, r, i, step);
      unsigned char& flags = seen[slot_of(shape, t)];
      if ((flags & (send ? sent : received)) != 0) return at(schedule_error::transfer_twice, r, i, step);
      if (send && (flags & made) == 0) return at(misplaced, r, i, step);
      flags |= send ? sent : received;
    }
  }
  for (std::size_t r = 0; r < programs.size(); ++r)
    for (std::size_t i = 0; i < programs[r].size(); ++i) {
      const step_entry& step = programs[r][i];
      if (step.op == step_op::pass) {
        transfer t;
        if (output_of(shape, static_cast<int>(r), step.pass, t) && (seen[slot_of(shape, t)] & sent) == 0)
          return at(schedule_error::transfer_missing, r, i, {step_op::send, -1, {}, t});
      } else if (const unsigned char flags = seen[slot_of(shape, step.transfer)]; (flags & sent) == 0) {
        return at(schedule_error::transfer_missing, r, i, {step_op::send, -1, {}, step.transfer});
      } else if ((flags & used) == 0 || (flags & received) == 0) {
        return at(schedule_error::receive_misplaced, r, i, {step_op::receive, -1, {}, step.transfer});
      }
    }
  return {};
}

/// Runs programs that `check_steps` accepts. The loops use plain pointers, because a compiler counts every call of a
/// vector's member in a constant expression.
class posting_run {
 public:
  constexpr posting_run(const pipeline_shape& shape, const std::vector<std::vector<step_entry>>& programs,
                        posting_rule rule)
      : shape_(shape),
        programs_(programs),
        rule_(rule),
        queues_(programs.size()),
        next_(programs.size(), 0),
        arrived_(slots(shape), 0),
        computed_(slots(shape), 0),
        home_(static_cast<std::size_t>(shape.stages()), 0) {  // clang 16 with libstdc++ 12 needs the 0
    for (std::size_t r = 0; r < programs.size(); ++r) queues_[r].steps.reserve(programs[r].size());
    for (std::size_t i = 0; i < home_.size(); ++i) home_[i] = shape.rank_of(static_cast<int>(i));
  }

  constexpr schedule_verdict run() {
    schedule_verdict v;
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t r = 0; r < programs_.size(); ++r) {
        moved = advance(r) || moved;
        moved = exchange(r, v) || moved;
        if (!v.ok()) return v;
      }
    }
    return stuck();
  }

 private:
  struct queue {
    std::vector<int> steps;  ///< indices in the program, in the order of posting
    std::size_t head = 0;
    constexpr bool waits() const { return head < steps.size(); }
  };

  constexpr std::size_t output_slot(int stage, const action& a) const {
    const bool forward = a.kind == action_kind::forward;
    return slot_of(shape_, {forward ? transfer_kind::activation : transfer_kind::gradient, stage, 0, a.microbatch});
  }
  constexpr bool ready(int rank, const action& a) const {
    const int from = source_of(shape_, a.kind, shape_.stage_of(rank, a.chunk));
    return from < 0 || (home_.data()[from] == rank ? computed_ : arrived_).data()[output_slot(from, a)] != 0;
  }
  /// The rank at the other end of a message.
  constexpr int peer_of(const step_entry& step) const {
    return home_.data()[step.op == step_op::send ? step.transfer.to_stage : step.transfer.from_stage];
  }

  /// Lets a rank compute and post as far as possible. Returns whether it made progress.
  constexpr bool advance(std::size_t r) {
    const int rank = static_cast<int>(r);
    const step_entry* const steps = programs_[r].data();
    const std::size_t size = programs_[r].size(), first = next_[r];
    const bool blocks = rule_ == posting_rule::blocking;
    queue& mine = queues_.data()[r];
    std::size_t at = first;
    for (; at < size; ++at) {
      const step_entry& step = steps[at];
      if (blocks && mine.waits()) break;
      if (step.op != step_op::pass) {
        mine.steps.push_back(static_cast<int>(at));
        continue;
      }
      if (!ready(rank, step.pass)) break;
      if (step.pass.kind == action_kind::forward || gives_input_gradient(step.pass.kind))
        computed_.data()[output_slot(shape_.stage_of(rank, step.pass.chunk), step.pass)] = 1;
    }
    next_[r] = at;
    return at != first;
  }

  /// Completes messages of a rank whose counterparts are also at the head of their queue. Returns whether it made
  /// progress; `v` may have an error then.
  constexpr bool exchange(std::size_t r, schedule_verdict& v) {
    bool moved = false;
    for (queue& mine = queues_.data()[r]; mine.waits();) {
      const int position = mine.steps[mine.head];
      const step_entry& step = programs_[r].data()[position];
      const auto peer = static_cast<std::size_t>(peer_of(step));
      queue& theirs = queues_.data()[peer];
      if (!theirs.waits()) break;
      const int their_position = theirs.steps[theirs.head];
      const step_entry& other = programs_[peer].data()[their_position];
      if (other.op == step.op || peer_of(other) != static_cast<int>(r)) break;
      if (!(other.transfer == step.transfer)) {
        v = {.code = schedule_error::messages_cross,
             .rank = static_cast<int>(r),
             .position = position,
             .step = step,
             .other_rank = static_cast<int>(peer),
             .other_position = their_position,
             .other_step = other};
        return true;
      }
      arrived_.data()[slot_of(shape_, step.transfer)] = 1;
      ++mine.head;
      ++theirs.head;
      moved = true;
    }
    return moved;
  }

  /// The index of the entry at which a rank is stuck: its waiting message, or else its next entry; -1: none.
  constexpr int stuck_at(std::size_t r) const {
    if (const queue& mine = queues_[r]; mine.waits()) return mine.steps[mine.head];
    return next_[r] < programs_[r].size() ? static_cast<int>(next_[r]) : -1;
  }
  constexpr schedule_verdict stuck() const {
    for (std::size_t r = 0; r < programs_.size(); ++r) {
      const int position = stuck_at(r);
      if (position < 0) continue;
      const step_entry& step = programs_[r][static_cast<std::size_t>(position)];
      schedule_verdict v{
          .code = schedule_error::deadlock, .rank = static_cast<int>(r), .position = position, .step = step};
      if (step.op == step_op::pass) return v;
      v.other_rank = peer_of(step);
      const auto other = static_cast<std::size_t>(v.other_rank);
      v.other_position = stuck_at(other);
      if (v.other_position >= 0) v.other_step = programs_[other][static_cast<std::size_t>(v.other_position)];
      return v;
    }
    return {};
  }

  const pipeline_shape& shape_;
  const std::vector<std::vector<step_entry>>& programs_;
  posting_rule rule_;
  std::vector<queue> queues_;                      ///< of each rank
  std::vector<std::size_t> next_;                  ///< each rank's first entry that is not done or posted
  std::vector<unsigned char> arrived_, computed_;  ///< whether results have arrived as messages, or were computed on
                                                   ///< the rank
  std::vector<int> home_;                          ///< the rank of each stage
};

constexpr schedule_verdict run_programs(const pipeline_shape& shape,
                                        const std::vector<std::vector<step_entry>>& programs, posting_rule rule) {
  return posting_run(shape, programs, rule).run();
}

}  // namespace detail

/// Verifies that programs finish if each rank posts its messages by `rule`, in its program's order. Computations wait
/// for their inputs; sends and receives wait only under `blocking`. Missing, duplicate or misplaced messages are
/// refused. So are illegal sizes, and actions of chunks and microbatches that do not exist.
constexpr schedule_verdict verify_programs(const pipeline_shape& shape,
                                           const std::vector<std::vector<step_entry>>& programs,
                                           posting_rule rule = posting_rule::global_list) {
  if (!shape.legal() || programs.size() != static_cast<std::size_t>(shape.ranks))
    return {.code = schedule_error::shape_illegal};
  if (const schedule_verdict v = detail::check_steps(shape, programs); !v.ok()) return v;
  return detail::run_programs(shape, programs, rule);
}

// The actions of a pipeline: each must run once, in order.

/// Further requirements of `verify`.
struct verify_options {
  posting_rule posting = posting_rule::global_list;
  /// The most activations that a rank may keep, in microbatch-stages (one of v chunks counts 1/v); negative: no limit.
  double max_activations = -1;
};

namespace detail {

/// The largest number of chunk activations that a rank keeps at once, from F until B or W, by its order.
constexpr int peak_chunks(const std::vector<action>& order) {
  int held = 0, peak = 0;
  for (const action& a : order) {
    if (a.kind == action_kind::forward) peak = std::max(peak, ++held);
    if (frees_activations(a.kind)) --held;
  }
  return peak;
}

constexpr schedule_verdict check_shape(const pipeline_shape& shape) {
  if (!shape.legal()) return {.code = schedule_error::shape_illegal};
  return {};
}

/// Checks that each stage computes each microbatch once forward and once backward, in that order, within the limit.
constexpr schedule_verdict check_actions(const schedule& s, double max_activations) {
  const pipeline_shape& shape = s.shape;
  if (const schedule_verdict v = check_shape(shape); !v.ok()) return v;
  if (s.order.size() != static_cast<std::size_t>(shape.ranks)) return {.code = schedule_error::shape_illegal};

  const auto bit = [](action_kind kind) { return static_cast<unsigned char>(1u << static_cast<unsigned>(kind)); };
  constexpr unsigned char f = 1, b = 2, i_half = 4, w_half = 8;
  std::vector<unsigned char> seen(static_cast<std::size_t>(shape.stages() * shape.microbatches), 0);
  for (int r = 0; r < shape.ranks; ++r) {
    const std::vector<action>& order = s.order[static_cast<std::size_t>(r)];
    int held = 0;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const action a = order[i];
      schedule_verdict wrong{.rank = r, .position = static_cast<int>(i), .step = {step_op::pass, -1, a}};
      const auto refuse = [&](schedule_error code) {
        wrong.code = code;
        return wrong;
      };
      if (a.chunk >= shape.chunks) return refuse(schedule_error::unknown_chunk);
      if (a.microbatch >= shape.microbatches) return refuse(schedule_error::unknown_microbatch);
      unsigned char& flags =
          seen[static_cast<std::size_t>(shape.stage_of(r, a.chunk) * shape.microbatches + a.microbatch)];
      if ((flags & bit(a.kind)) != 0) return refuse(schedule_error::done_twice);
      if (a.kind != action_kind::forward && (flags & f) == 0) return refuse(schedule_error::backward_before_forward);
      if ((a.kind == action_kind::backward && (flags & (i_half | w_half)) != 0) ||
          (a.kind != action_kind::backward && (flags & b) != 0))
        return refuse(schedule_error::two_backwards);
      if (a.kind == action_kind::weight_backward && (flags & i_half) == 0)
        return refuse(schedule_error::weight_before_input);
      flags |= bit(a.kind);
      if (a.kind == action_kind::forward) ++held;
      if (frees_activations(a.kind)) --held;
      if (max_activations >= 0 && held > max_activations * shape.chunks + 1e-9) {
        wrong.above = (peak_chunks(order) + shape.chunks - 1) / shape.chunks;
        return refuse(schedule_error::over_activation_limit);
      }
    }
  }
  for (int r = 0; r < shape.ranks; ++r)
    for (int chunk = 0; chunk < shape.chunks; ++chunk)
      for (int mb = 0; mb < shape.microbatches; ++mb) {
        const unsigned char flags = seen[static_cast<std::size_t>(shape.stage_of(r, chunk) * shape.microbatches + mb)];
        if ((flags & f) == 0)
          return {
              .code = schedule_error::forward_missing, .rank = r, .step = {step_op::pass, -1, forward_of(chunk, mb)}};
        if ((flags & (b | w_half)) == 0)
          return {.code = schedule_error::backward_missing,
                  .rank = r,
                  .step = {step_op::pass,
                           -1,
                           (flags & i_half) != 0 ? weight_backward_of(chunk, mb) : backward_of(chunk, mb),
                           {}}};
      }
  return {};
}

/// Describes the action at which a rank is stuck after the actions in `ran`, and the rank for which it waits.
constexpr schedule_verdict name_stuck(const schedule& s, const simulation& ran) {
  for (int r = 0; r < s.shape.ranks; ++r) {
    const auto rank = static_cast<std::size_t>(r);
    const std::size_t at = ran.ranks[rank].size();
    if (at == s.order[rank].size()) continue;
    const action a = s.order[rank][at];
    const int stage = s.shape.stage_of(r, a.chunk);
    schedule_verdict v{.code = schedule_error::never_ready,
                       .rank = r,
                       .position = static_cast<int>(at),
                       .step = {step_op::pass, -1, a},
                       .other_rank = s.shape.rank_of(a.kind == action_kind::forward ? stage - 1 : stage + 1)};
    const auto other = static_cast<std::size_t>(v.other_rank);
    if (const std::size_t theirs = ran.ranks[other].size(); theirs < s.order[other].size()) {
      v.other_position = static_cast<int>(theirs);
      v.other_step.pass = s.order[other][theirs];
    }
    return v;
  }
  return {};
}

}  // namespace detail

/// The most activations that a rank keeps at once, in microbatch-stages (one of v chunks counts 1/v). It keeps one from
/// the start of a forward to the end of its B or W.
constexpr double peak_activations(const schedule& s, int rank) {
  return static_cast<double>(detail::peak_chunks(s.order[static_cast<std::size_t>(rank)])) / s.shape.chunks;
}
/// The largest value over all ranks.
constexpr double peak_activations(const schedule& s) {
  double peak = 0;
  for (std::size_t r = 0; r < s.order.size(); ++r) peak = std::max(peak, peak_activations(s, static_cast<int>(r)));
  return peak;
}

/// Verifies that a schedule is complete, ordered, within the limit on activations, and finishes under the posting rule.
/// It is complete if each stage computes each microbatch once: F, and B or I and W. It is ordered if F comes before B
/// or I, and I before W. The verdict has the first wrong action or message.
///
/// Costs do not matter: a schedule that finishes with some costs finishes with any. Under `global_list` the programs
/// for unit costs are run. Programs for other costs also finish, for the reason given at `rank_program`.
constexpr schedule_verdict verify(const schedule& s, const verify_options& options = {}) {
  if (const schedule_verdict v = detail::check_actions(s, options.max_activations); !v.ok()) return v;
  simulation times;
  if (!detail::run_schedule(s, {}, times)) return detail::name_stuck(s, times);
  // Not a conditional expression, because g++ 12 destroys its operands twice in constant expressions.
  if (options.posting != posting_rule::global_list)
    return detail::run_programs(s.shape, detail::program_in_own_order(s), options.posting);
  return detail::run_programs(s.shape, rank_program(s, times), options.posting);
}

/// Throws `error` with the schedule's name, its sizes and the verdict unless `verify` accepts it.
inline void require_verified(const schedule& s, const verify_options& options = {}) {
  if (const schedule_verdict v = verify(s, options); !v.ok())
    fail({"schedule ", s.name.str(), " (", s.shape.ranks, " ranks, ", s.shape.chunks, " chunks each, ",
          s.shape.microbatches, " microbatches): ", describe(v)});
}

// The messages that have certainly arrived when a rank computes, by its schedule. While a step is recorded, no
// communicator can be asked for this, so this list determines when a send's memory is freed.

/// For each entry of the program of `rank`: the earlier sends, counted from 0, whose arrival becomes certain when a
/// computation has its input. The receiver has begun the action that uses the message, because a later result of the
/// receiver has reached this rank, perhaps through others. (Vector clocks: Fidge 1988, Mattern 1989.) `programs` are
/// the programs of all ranks of a verified schedule.
std::vector<std::vector<std::size_t>> arrived_sends(const pipeline_shape& shape,
                                                    const std::vector<std::vector<step_entry>>& programs, int rank);

// The check of a whole step. Every use of a parameter must follow its gather; every reduction must follow the last
// gradient and precede the update. Activations must be on the device when a backward pass reads them, and copies must
// be complete when memory is freed. Shared collectives must have one order, and memory must be within its limits.

/// The outcome of a check: the wrong entry, and the entry that it contradicts, if there is one.
struct step_verdict {
  step_error code = step_error::ok;
  int rank = -1;
  int position = -1;  ///< index in the rank's program, from 0; -1: an entry is missing
  step_entry entry{};
  int other_rank = -1;
  int other_position = -1;  ///< -1: no other entry
  step_entry other{};
  double bytes = 0, limit = 0;  ///< for over_memory and over_host_memory
  std::string pipeline{};       ///< for pipeline_refused: the verdict of `verify`

  bool ok() const { return code == step_error::ok; }
};

/// The verdict as one line: "rank 0, entry 7 (B0.0 of unit 1): a pass reads ...; entry 5 (release of unit 1)".
std::string describe(const step_verdict& v);

/// The bytes of an element, and the number of ranks of the data axes. `most` and `most_on_host` are the limits of a
/// rank; negative: no limit.
struct step_memory {
  double parameter = 4;  ///< in use
  double gradient = 4;
  int data_ranks = 1;
  double most = -1;
  double most_on_host = -1;  ///< for offloaded activations
};

namespace detail {

/// The pipeline of a step's passes and messages; an action is at the place of its pass's last unit.
std::vector<std::vector<step_entry>> pipeline_of(const step_schedule& s);

}  // namespace detail

/// Verifies a step, in this order. Each rank's passes are whole; its parameters, gradients and updates are in order and
/// within the limit. Passes and messages form a pipeline that finishes under the posting rule. Collectives that ranks
/// share have one order. The verdict has the first wrong entry, and the entry that it contradicts.
step_verdict verify(const step_schedule& s, const step_memory& memory = {}, const verify_options& options = {});

/// Throws `error` with the verdict's text unless the program of `rank` passes the checks of a single rank.
void require_verified(const step_schedule& s, int rank, const step_memory& memory = {});

/// Throws `error` with the verdict's text unless `verify` accepts the step.
void require_verified(const step_schedule& s, const step_memory& memory = {}, const verify_options& options = {});

/// The most bytes of gathered parameters, gradients and activations (`step_unit::kept_bytes`) that a rank holds on its
/// device at a time. `verify` must accept the step.
double peak_bytes(const step_schedule& s, int rank, step_memory memory);

/// The most bytes of offloaded activations that a rank holds in the host's memory at a time. A copy is held until the
/// pass that uses it begins. `verify` must accept the step.
double peak_host_bytes(const step_schedule& s, int rank);

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/schedule/verify.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
