// The costs of actions and messages, and the times of the entries of a step.
#pragma once

#include <cstddef>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/schedule.hpp"

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
