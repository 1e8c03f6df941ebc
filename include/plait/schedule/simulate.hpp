// The times of a schedule's actions and messages for given costs, computed without a device or a communicator.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/schedule/transfer.hpp"

namespace plait {

/// Times of one microbatch's actions, in any unit.
struct action_times {
  double forward = 1;
  double backward = 2;  ///< both halves together
  double input_backward = 1;
  double weight_backward = 1;

  constexpr double of(action_kind kind) const {
    switch (kind) {
      case action_kind::forward:
        return forward;
      case action_kind::backward:
        return backward;
      case action_kind::input_backward:
        return input_backward;
      default:
        return weight_backward;
    }
  }
};

/// The costs of actions and messages. The defaults are the unit costs of the literature: F = I = W = 1, B = 2, and
/// communication takes no time.
struct schedule_costs {
  /// Of one microbatch in *all* chunks of a rank; one of v chunks takes a v-th of it. Schedules with different numbers
  /// of chunks are thus compared for one model.
  action_times rank_part{};
  /// Where it is not empty: the times of each stage, in place of `rank_part`. One entry per stage.
  std::vector<action_times> stages{};
  /// From the end of a send's action until the receiver may start, in the same unit. The sender computes on.
  double link = 0;
  /// Where it is not empty: the same for each pair of ranks, [from * ranks + to], in place of `link`.
  std::vector<double> links{};

  constexpr double of(const pipeline_shape& shape, action_kind kind, int stage) const {
    return stages.empty() ? rank_part.of(kind) / shape.chunks : stages[static_cast<std::size_t>(stage)].of(kind);
  }
  constexpr double of_link(const pipeline_shape& shape, int from, int to) const {
    if (from == to) return 0;
    return links.empty() ? link : links[static_cast<std::size_t>(from * shape.ranks + to)];
  }
};

struct timed_action {
  plait::action action;
  double start = 0;
  double end = 0;
  int sequence = 0;  ///< place in an order of all actions in which each comes after those that it waits for
};

struct timed_transfer {
  plait::transfer transfer;
  double sent = 0;     ///< the end of the action that makes it
  double arrived = 0;  ///< sent + link
  int sequence = 0;    ///< that of the action that makes it
};

/// A step of the pipeline as it would run if every rank started each action as soon as its inputs are there.
struct simulation {
  std::vector<std::vector<timed_action>> ranks;  ///< of each rank, in its order
  std::vector<timed_transfer> transfers;         ///< of all ranks, by time: the global transfer list
  double makespan = 0;                           ///< end of the last action of all

  constexpr double busy(int rank) const {
    double sum = 0;
    for (const timed_action& a : ranks[static_cast<std::size_t>(rank)]) sum += a.end - a.start;
    return sum;
  }
  /// From a rank's first start to its last end.
  constexpr double span(int rank) const {
    const auto& mine = ranks[static_cast<std::size_t>(rank)];
    return mine.empty() ? 0 : mine.back().end - mine.front().start;
  }
  /// Share of all ranks' time from 0 to the makespan that is idle: what a step pays that ends with a global operation,
  /// such as a gradient norm.
  constexpr double makespan_idle() const {
    double sum = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r) sum += busy(static_cast<int>(r));
    return makespan > 0 ? 1 - sum / (makespan * static_cast<double>(ranks.size())) : 0;
  }
  /// The largest share of a rank's own span that is idle: what the zero-bubble papers count, for steps that overlap.
  constexpr double span_idle() const {
    double worst = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r)
      if (const double all = span(static_cast<int>(r)); all > 0)
        worst = std::max(worst, 1 - busy(static_cast<int>(r)) / all);
    return worst;
  }
};

namespace detail {

/// Throws `error`, which names `who` for a shape of illegal sizes, unless the costs are costs of this shape.
constexpr void require_costs(const char* who, const pipeline_shape& shape, const schedule_costs& costs) {
  require_legal(who, shape);
  const auto cheap = [](const action_times& t) {
    return t.forward >= 0 && t.backward >= 0 && t.input_backward >= 0 && t.weight_backward >= 0;
  };
  bool legal = cheap(costs.rank_part) && costs.link >= 0;
  for (const action_times& t : costs.stages) legal = legal && cheap(t);
  for (double t : costs.links) legal = legal && t >= 0;
  if (!legal) fail("schedule_costs: a time is negative, or is no number");
  if (!(costs.stages.empty() || costs.stages.size() == static_cast<std::size_t>(shape.stages())))
    fail("schedule_costs: stages has not one entry per stage");
  if (!(costs.links.empty() || costs.links.size() == static_cast<std::size_t>(shape.ranks * shape.ranks)))
    fail("schedule_costs: links has not one entry per pair of ranks");
}

/// Runs a schedule whose actions name existing chunks and microbatches. Returns false when it cannot finish: some
/// rank's next action waits for what never comes. `done[rank]` counts the actions that ran.
constexpr bool run_schedule(const schedule& s, const schedule_costs& costs, simulation& out, std::vector<int>& done) {
  const pipeline_shape& shape = s.shape;
  const auto cells = static_cast<std::size_t>(shape.stages()) * static_cast<std::size_t>(shape.microbatches);
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  // End of F, and of B or I, of each stage and microbatch; negative: not yet.
  std::vector<double> forward_ends(cells, -1.0), backward_ends(cells, -1.0);
  double *const forward_end = forward_ends.data(), *const backward_end = backward_ends.data();
  std::vector<double> now(ranks, 0.0);
  done.assign(ranks, 0);
  out = {};
  out.ranks.resize(ranks);
  for (std::size_t r = 0; r < ranks; ++r) out.ranks[r].reserve(s.order[r].size());

  out.transfers.reserve(2 * cells);

  const int last = shape.stages() - 1;
  int sequence = 0;
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < shape.ranks; ++r) {
      const auto rank = static_cast<std::size_t>(r);
      const action* const order = s.order[rank].data();
      const std::size_t size = s.order[rank].size();
      std::vector<timed_action>& timeline = out.ranks[rank];
      double free_at = now[rank];
      auto i = static_cast<std::size_t>(done[rank]);
      for (; i < size; ++i) {
        const action a = order[i];
        const int stage = shape.stage_of(r, a.chunk);
        const auto cell = static_cast<std::size_t>(stage * shape.microbatches + a.microbatch);
        const auto row = static_cast<std::size_t>(shape.microbatches);
        double ready = 0;
        int to = -1;
        if (a.kind == action_kind::forward) {
          if (stage > 0) {
            if (forward_end[cell - row] < 0) break;
            ready = forward_end[cell - row] + costs.of_link(shape, shape.rank_of(stage - 1), r);
          }
          if (stage < last) to = stage + 1;
        } else if (gives_input_gradient(a.kind)) {
          if (forward_end[cell] < 0) break;
          if (stage < last) {
            if (backward_end[cell + row] < 0) break;
            ready = backward_end[cell + row] + costs.of_link(shape, shape.rank_of(stage + 1), r);
          }
          if (stage > 0) to = stage - 1;
        } else if (backward_end[cell] < 0) {
          break;
        }
        const double start = free_at > ready ? free_at : ready;
        const double end = start + costs.of(shape, a.kind, stage);
        free_at = end;
        if (a.kind == action_kind::forward) forward_end[cell] = end;
        if (gives_input_gradient(a.kind)) backward_end[cell] = end;
        timeline.push_back({a, start, end, sequence});
        if (to >= 0 && shape.rank_of(to) != r) {
          const auto kind = to > stage ? transfer_kind::activation : transfer_kind::gradient;
          out.transfers.push_back(
              {{kind, stage, to, a.microbatch}, end, end + costs.of_link(shape, r, shape.rank_of(to)), sequence});
        }
        ++sequence;
        moved = true;
      }
      now[rank] = free_at;
      done[rank] = static_cast<int>(i);
    }
  }
  bool finished = true;
  for (std::size_t r = 0; r < ranks; ++r) {
    out.makespan = std::max(out.makespan, now[r]);
    finished = finished && static_cast<std::size_t>(done[r]) == s.order[r].size();
  }
  timed_transfer* const first = out.transfers.data();
  std::sort(first, first + out.transfers.size(), [](const timed_transfer& a, const timed_transfer& b) {
    return a.sent != b.sent ? a.sent < b.sent : a.sequence < b.sequence;
  });
  return finished;
}

}  // namespace detail

/// Times of all actions and messages of one step. The schedule must be one that `verify` accepts; throws `error` if it
/// cannot finish, if its sizes are not legal or it names a chunk or a microbatch that it does not have, and if `costs`
/// has a negative time or a table of another size.
constexpr simulation simulate(const schedule& s, const schedule_costs& costs = {}) {
  detail::require_costs("simulate", s.shape, costs);
  if (s.order.size() != static_cast<std::size_t>(s.shape.ranks))
    fail("simulate: the schedule has not one list of actions for each rank");
  for (const std::vector<action>& order : s.order)
    for (const action& a : order)
      if (a.chunk >= s.shape.chunks || a.microbatch >= s.shape.microbatches)
        fail("simulate: the schedule names a chunk or a microbatch that it does not have; verify names the action");
  simulation result;
  std::vector<int> done;
  if (!detail::run_schedule(s, costs, result, done))
    fail("simulate: the schedule cannot finish; verify names the action");
  return result;
}

/// How many activations a rank keeps from a time on, in microbatch-stages (one of v chunks counts 1/v).
struct held_activations {
  double time = 0;
  double held = 0;
};

/// The activations of a rank over time: one entry for each change, up at the start of a forward, down at the end of its
/// B or W.
constexpr std::vector<held_activations> activations_over_time(const schedule& s, const simulation& times, int rank) {
  std::vector<held_activations> curve;
  int held = 0;
  for (const timed_action& a : times.ranks[static_cast<std::size_t>(rank)]) {
    if (a.action.kind == action_kind::forward)
      curve.push_back({a.start, static_cast<double>(++held) / s.shape.chunks});
    else if (frees_activations(a.action.kind))
      curve.push_back({a.end, static_cast<double>(--held) / s.shape.chunks});
  }
  return curve;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
