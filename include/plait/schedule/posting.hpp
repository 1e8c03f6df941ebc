// Whether the messages of a pipeline can deadlock, by the order in which ranks post them. The order of actions is
// another matter: schedule/verify.hpp checks both. Programs come from schedule/program.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/schedule/errors.hpp"
#include "plait/schedule/program.hpp"

namespace plait {

// The outcome of checking a schedule: ok, or an error of schedule/errors.hpp, with where it stands. The one for layouts
// is layout/verdict.hpp.

/// The outcome of a check with its facts: the first offending action or message, and where it stands.
struct schedule_verdict {
  schedule_error code = schedule_error::ok;
  int rank = -1;            ///< -1: no particular one
  int position = -1;        ///< in the rank's order (actions) or program (steps), from 0; -1: none
  step_entry step{};        ///< what stands there, or is missing
  int other_rank = -1;      ///< whom it waits for
  int other_position = -1;  ///< where that one is stuck; -1: it is through
  step_entry other_step{};
  int below = 0;  ///< nearest legal number of microbatches (or limit on activations) below; 0: none
  int above = 0;  ///< ... and above

  constexpr bool ok() const { return code == schedule_error::ok; }
};

/// The verdict as one line: "rank 2, action 5 (B3.0): a backward comes before ...".
std::string describe(const schedule_verdict& v);

/// In which order, and on how many queues, a rank posts its messages. A message passes when it is at the head of a
/// queue of its sender and of its receiver (rendezvous): the strictest thing that a network may do, so that what
/// finishes here finishes everywhere. All but `global_list` take each rank's own order: receive what an action needs,
/// compute, send what it made.
///
/// No receive takes a message from just anyone, therefore one run that finishes proves that every run does
/// (Siegel and Avrunin, Modeling wildcard-free MPI programs for verification, 2005).
enum class posting_rule : std::uint8_t {
  blocking,            ///< one after the other; nothing is computed while a message waits
  one_queue,           ///< posted without blocking, on one queue per rank: one NCCL communicator, one stream
  per_peer,            ///< one queue for each other rank
  per_peer_direction,  ///< two queues for each other rank: to and from it
  per_stage_and_kind,  ///< a queue for each pair of stages, each direction, and activations or gradients: tags
  global_list,         ///< one queue, in the order of the transfers' simulated times on every rank: `rank_program`
};

constexpr std::string_view name_of(posting_rule rule) {
  constexpr std::string_view names[] = {"blocking",           "one_queue",          "per_peer",
                                        "per_peer_direction", "per_stage_and_kind", "global_list"};
  return names[static_cast<std::size_t>(rule)];
}

namespace detail {

/// The message that an action needs, or the one that it makes. False: none, or handed over on the rank.
constexpr bool input_of(const pipeline_shape& shape, int rank, const action& a, transfer& t) {
  const int stage = shape.stage_of(rank, a.chunk);
  const bool forward = a.kind == action_kind::forward;
  if (!forward && !gives_input_gradient(a.kind)) return false;
  const int from = forward ? stage - 1 : stage + 1;
  if (from < 0 || from >= shape.stages() || shape.rank_of(from) == rank) return false;
  t = {forward ? transfer_kind::activation : transfer_kind::gradient, from, stage, a.microbatch};
  return true;
}
constexpr bool output_of(const pipeline_shape& shape, int rank, const action& a, transfer& t) {
  const int stage = shape.stage_of(rank, a.chunk);
  const bool forward = a.kind == action_kind::forward;
  if (!forward && !gives_input_gradient(a.kind)) return false;
  const int to = forward ? stage + 1 : stage - 1;
  if (to < 0 || to >= shape.stages() || shape.rank_of(to) == rank) return false;
  t = {forward ? transfer_kind::activation : transfer_kind::gradient, stage, to, a.microbatch};
  return true;
}

/// A number for each message that a shape can have.
constexpr std::size_t slot_of(const pipeline_shape& shape, const transfer& t) {
  return (static_cast<std::size_t>(t.from_stage) * 2 + (t.kind == transfer_kind::gradient ? 1 : 0)) *
             static_cast<std::size_t>(shape.microbatches) +
         static_cast<std::size_t>(t.microbatch);
}
constexpr std::size_t slots(const pipeline_shape& shape) {
  return static_cast<std::size_t>(shape.stages()) * 2 * static_cast<std::size_t>(shape.microbatches);
}

/// Every rank's own order: receive, compute, send.
constexpr std::vector<std::vector<step_entry>> program_in_own_order(const schedule& s) {
  std::vector<std::vector<step_entry>> programs(s.order.size());
  for (std::size_t r = 0; r < s.order.size(); ++r) {
    programs[r].reserve(s.order[r].size() * 3);
    for (const action& a : s.order[r]) {
      transfer t;
      if (input_of(s.shape, static_cast<int>(r), a, t)) programs[r].push_back({step_op::receive, -1, {}, t});
      programs[r].push_back({step_op::pass, -1, a, {}});
      if (output_of(s.shape, static_cast<int>(r), a, t)) programs[r].push_back({step_op::send, -1, {}, t});
    }
  }
  return programs;
}

/// Which of its queues a rank posts a message on.
constexpr std::size_t queue_of(posting_rule rule, const pipeline_shape& shape, const step_entry& step) {
  const bool send = step.op == step_op::send;
  const auto peer = static_cast<std::size_t>(shape.rank_of(send ? step.transfer.to_stage : step.transfer.from_stage));
  switch (rule) {
    case posting_rule::per_peer:
      return peer;
    case posting_rule::per_peer_direction:
      return peer * 2 + (send ? 1 : 0);
    case posting_rule::per_stage_and_kind:
      // Its own stage and which way the message goes say the other stage.
      return static_cast<std::size_t>(shape.chunk_of(send ? step.transfer.from_stage : step.transfer.to_stage)) * 4 +
             (step.transfer.kind == transfer_kind::gradient ? 2 : 0) + (send ? 1 : 0);
    default:
      return 0;
  }
}
/// How many queues a rank has.
constexpr std::size_t queues_of(posting_rule rule, const pipeline_shape& shape) {
  switch (rule) {
    case posting_rule::per_peer:
      return static_cast<std::size_t>(shape.ranks);
    case posting_rule::per_peer_direction:
      return static_cast<std::size_t>(shape.ranks) * 2;
    case posting_rule::per_stage_and_kind:
      return static_cast<std::size_t>(shape.chunks) * 4;
    default:
      return 1;
  }
}

/// Each message that an action needs or makes is received before it and sent after it, once, by the right rank.
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

/// The run itself, of programs that `check_steps` accepts. Plain pointers in the loops: a compiler that evaluates this
/// counts every call of a vector's member.
constexpr schedule_verdict run_programs(const pipeline_shape& shape,
                                        const std::vector<std::vector<step_entry>>& programs, posting_rule rule) {
  struct queue {
    std::vector<int> steps;  ///< positions in the program, in the order of posting
    std::size_t head = 0;
    constexpr bool waits() const { return head < steps.size(); }
  };
  const auto ranks = programs.size();
  const std::size_t width = queues_of(rule, shape);
  std::vector<queue> all_queues(ranks * width);
  queue* const queues = all_queues.data();
  if (width == 1)
    for (std::size_t r = 0; r < ranks; ++r) queues[r].steps.reserve(programs[r].size());
  std::vector<std::size_t> next(ranks, 0);               // the step of each rank that is not yet done or posted
  std::vector<unsigned char> arrived(slots(shape), 0);   // messages
  std::vector<unsigned char> computed(slots(shape), 0);  // by from_stage and kind, for hand-over on a rank
  std::vector<int> rank_of_stage(static_cast<std::size_t>(shape.stages()),
                                 0);  // clang 16 with libstdc++ 12 needs the 0
  for (std::size_t i = 0; i < rank_of_stage.size(); ++i) rank_of_stage[i] = shape.rank_of(static_cast<int>(i));
  const int* const home = rank_of_stage.data();
  const auto output_slot = [&](int stage, transfer_kind kind, int microbatch) {
    return slot_of(shape, {kind, stage, 0, microbatch});
  };
  const auto ready = [&](int rank, const action& a) {
    const int stage = shape.stage_of(rank, a.chunk);
    transfer t;
    if (input_of(shape, rank, a, t)) return arrived[slot_of(shape, t)] != 0;
    if (a.kind == action_kind::forward)
      return stage == 0 || computed[output_slot(stage - 1, transfer_kind::activation, a.microbatch)] != 0;
    if (gives_input_gradient(a.kind) && stage + 1 < shape.stages())
      return computed[output_slot(stage + 1, transfer_kind::gradient, a.microbatch)] != 0;
    return true;
  };

  // The peer's queue for a message between two stages.
  const auto theirs_of = [&](const step_entry& step) {
    const step_op other_end = step.op == step_op::send ? step_op::receive : step_op::send;
    return queue_of(rule, shape, {other_end, -1, {}, step.transfer});
  };

  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < ranks; ++r) {
      const int rank = static_cast<int>(r);
      const step_entry* const mine_steps = programs[r].data();
      const std::size_t size = programs[r].size();
      // Compute and post as far as possible.
      std::size_t at = next[r];
      for (; at < size; ++at) {
        const step_entry& step = mine_steps[at];
        if (step.op == step_op::pass) {
          if (rule == posting_rule::blocking && queues[r].waits()) break;
          if (!ready(rank, step.pass)) break;
          const int stage = shape.stage_of(rank, step.pass.chunk);
          if (step.pass.kind == action_kind::forward)
            computed[output_slot(stage, transfer_kind::activation, step.pass.microbatch)] = 1;
          else if (gives_input_gradient(step.pass.kind))
            computed[output_slot(stage, transfer_kind::gradient, step.pass.microbatch)] = 1;
        } else {
          if (rule == posting_rule::blocking && queues[r].waits()) break;
          queues[r * width + queue_of(rule, shape, step)].steps.push_back(static_cast<int>(at));
        }
        moved = true;
      }
      next[r] = at;
      // Let messages pass whose counterpart is at the head as well.
      for (std::size_t q = 0; q < width; ++q) {
        for (queue& mine = queues[r * width + q]; mine.waits();) {
          const int position = mine.steps[mine.head];
          const step_entry& step = mine_steps[position];
          const bool send = step.op == step_op::send;
          const auto peer = static_cast<std::size_t>(home[send ? step.transfer.to_stage : step.transfer.from_stage]);
          // Seen from the peer, this rank is the other end, and the message goes the other way.
          const std::size_t theirs_at = rule == posting_rule::per_peer             ? r
                                        : rule == posting_rule::per_peer_direction ? r * 2 + (send ? 0 : 1)
                                        : rule == posting_rule::per_stage_and_kind ? theirs_of(step)
                                                                                   : 0;
          queue& theirs = queues[peer * width + theirs_at];
          if (!theirs.waits()) break;
          const int their_position = theirs.steps[theirs.head];
          const step_entry& other = programs[peer].data()[their_position];
          const int other_peer = home[other.op == step_op::send ? other.transfer.to_stage : other.transfer.from_stage];
          if (other.op == step.op || other_peer != rank) break;
          if (!(other.transfer == step.transfer))
            return {.code = schedule_error::messages_cross,
                    .rank = rank,
                    .position = position,
                    .step = step,
                    .other_rank = static_cast<int>(peer),
                    .other_position = their_position,
                    .other_step = other};
          arrived[slot_of(shape, step.transfer)] = 1;
          ++mine.head;
          ++theirs.head;
          moved = true;
        }
      }
    }
  }

  // What holds a rank up: the head of its first queue that waits, else its next step; -1: nothing.
  const auto stuck_at = [&](std::size_t r) {
    for (std::size_t q = 0; q < width; ++q)
      if (const queue& mine = queues[r * width + q]; mine.waits()) return mine.steps[mine.head];
    return next[r] < programs[r].size() ? static_cast<int>(next[r]) : -1;
  };
  for (std::size_t r = 0; r < ranks; ++r) {
    const int position = stuck_at(r);
    if (position < 0) continue;
    const step_entry& step = programs[r][static_cast<std::size_t>(position)];
    schedule_verdict v{
        .code = schedule_error::deadlock, .rank = static_cast<int>(r), .position = position, .step = step};
    if (step.op == step_op::pass) return v;
    v.other_rank = shape.rank_of(step.op == step_op::send ? step.transfer.to_stage : step.transfer.from_stage);
    v.other_position = stuck_at(static_cast<std::size_t>(v.other_rank));
    if (v.other_position >= 0)
      v.other_step = programs[static_cast<std::size_t>(v.other_rank)][static_cast<std::size_t>(v.other_position)];
    return v;
  }
  return {};
}

}  // namespace detail

/// Whether programs of steps finish when each rank posts its messages by `rule`, in the order in which they stand in
/// its program. Computes wait for what they need; sends and receives wait only under `blocking`. Messages that are
/// missing, double or misplaced are refused as well, and so are sizes that are not legal and actions of chunks and
/// microbatches that the shape does not have.
constexpr schedule_verdict verify_programs(const pipeline_shape& shape,
                                           const std::vector<std::vector<step_entry>>& programs,
                                           posting_rule rule = posting_rule::global_list) {
  if (!shape.legal() || programs.size() != static_cast<std::size_t>(shape.ranks))
    return {.code = schedule_error::shape_illegal};
  if (const schedule_verdict v = detail::check_steps(shape, programs); !v.ok()) return v;
  return detail::run_programs(shape, programs, rule);
}

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/schedule/posting.ipp"  // IWYU pragma: keep
#endif
