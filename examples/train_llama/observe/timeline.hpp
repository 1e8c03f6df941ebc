// The times of all actions of a step, simulated or measured, in one form for drawings and traces.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/schedule/simulate.hpp"

namespace plait {

/// The times of each rank's actions, simulated or measured, for drawings and traces. Actions of a rank are in the order
/// of time, in any unit and from any origin. An action that paused between two units of its stage is there in parts.
struct pipeline_timeline {
  std::string title;
  std::string unit;  ///< unit of the times, as in "ms"; empty for unit costs
  pipeline_shape shape;
  std::vector<std::vector<timed_action>> ranks;
  /// The other entries of each rank's step: gathers and reductions, which overlap passes, the norm and updates. Empty
  /// for the schedule of a pipeline.
  std::vector<std::vector<timed_entry>> beside{};

  double begin() const {
    double first = std::numeric_limits<double>::infinity();
    for (const auto& mine : ranks)
      if (!mine.empty()) first = std::min(first, mine.front().start);
    for (const auto& mine : beside)
      for (const timed_entry& e : mine) first = std::min(first, e.start);
    return std::isinf(first) ? 0 : first;
  }
  double end() const {
    double last = begin();
    for (const auto& mine : ranks)
      if (!mine.empty()) last = std::max(last, mine.back().end);
    for (const auto& mine : beside)
      for (const timed_entry& e : mine) last = std::max(last, e.end);
    return last;
  }
  /// Returns the time that the rank computes: passes, the norm and updates.
  double busy(std::size_t rank) const {
    double sum = detail::busy_time(ranks[rank]);
    if (rank < beside.size())
      for (const timed_entry& e : beside[rank])
        if (e.entry.op == step_op::norm || e.entry.op == step_op::update) sum += e.end - e.start;
    return sum;
  }
  /// Returns the rank's idle share of the time from the first start of all ranks to the last end.
  double idle(std::size_t rank) const { return end() > begin() ? 1 - busy(rank) / (end() - begin()) : 0; }
  /// Returns the idle share of all ranks over this interval.
  double idle() const {
    double sum = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r) sum += idle(r);
    return ranks.empty() ? 0 : sum / static_cast<double>(ranks.size());
  }
  /// Returns the largest idle share of a rank over its own span, from its first start to its last end.
  double span_idle() const { return detail::span_idle(ranks); }
};

/// Returns "zb_v, 4 ranks with 2 chunks each, 8 microbatches".
inline std::string title_of(const schedule& s) {
  std::string title = cat({s.name.str(), ", ", s.shape.ranks, " ranks"});
  if (s.shape.chunks > 1) append(title, {" with ", s.shape.chunks, " chunks each"});
  append(title, {", ", s.shape.microbatches, " microbatches"});
  return title;
}

/// Returns the simulated timeline of a schedule.
inline pipeline_timeline timeline_of(const schedule& s, const schedule_costs& costs = {}, std::string unit = "") {
  return {title_of(s), std::move(unit), s.shape, simulate(s, costs).ranks};
}

namespace detail {

/// Adds a part of a pass. If it is the next part of the last action and begins within `gap`, it lengthens that action.
inline void add_part(std::vector<timed_action>& to, const action& pass, double start, double end, double gap) {
  if (!to.empty() && to.back().action == pass && start - to.back().end <= gap)
    to.back().end = end;
  else
    to.push_back({pass, start, end, static_cast<int>(to.size())});
}

}  // namespace detail

/// Returns the simulated timeline of a whole step between equal steps. Operations that the step before has started may
/// end in it.
inline pipeline_timeline timeline_of(const step_schedule& s, const step_costs& costs, std::string title,
                                     std::string unit = "") {
  const step_simulation times = simulate(s, costs);
  pipeline_timeline t{std::move(title), std::move(unit), s.shape, {}, times.links};
  for (std::size_t r = 0; r < times.ranks.size(); ++r) {
    t.beside[r].insert(t.beside[r].end(), times.ties[r].begin(), times.ties[r].end());
    std::vector<timed_action>& passes = t.ranks.emplace_back();
    for (const timed_entry& e : times.ranks[r]) {
      if (e.entry.op == step_op::pass) detail::add_part(passes, e.entry.pass, e.start, e.end, 0);
      if ((e.entry.op == step_op::norm || e.entry.op == step_op::update) && e.end > e.start) t.beside[r].push_back(e);
    }
  }
  return t;
}

}  // namespace plait
