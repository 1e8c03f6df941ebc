// In words: which part of a step waited longest, and for what. The numbers come from a
// rank's `wait_book` (comm/metrics.hpp).
#pragma once

#include <cstddef>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "plait/comm/metrics.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// A part of a step, all its microbatches together, and the seconds that it waited.
struct step_wait {
  std::string who;   ///< "the update of model.layers.0", "backward passes of head"
  std::string what;  ///< "the reduction of model.layers.0"; empty: its own calls
  double seconds = 0;

  /// "the norm waited 3.1 ms a step for the reduction of model.layers.0"
  std::string text(double steps) const {
    char time[32];
    std::snprintf(time, sizeof time, "%.2g ms a step", 1e3 * seconds / steps);
    return what.empty() ? cat({who, " waited ", time, " in blocking calls"})
                        : cat({who, " waited ", time, " for ", what});
  }
};

namespace detail {

/// Returns the name of an entry where microbatches are taken together.
inline std::string name_in_waits(const step_entry& e, const std::vector<std::string>& units) {
  const std::string unit = e.unit < 0 ? "" : units[static_cast<std::size_t>(e.unit)];
  const auto stages = [&] { return cat({"stage ", e.transfer.from_stage, " to ", e.transfer.to_stage}); };
  switch (e.op) {
    case step_op::pass: {
      const char* const kinds[] = {"forward passes", "backward passes", "input gradients", "weight gradients"};
      return cat({kinds[static_cast<std::size_t>(e.pass.kind)], " of ", unit});
    }
    case step_op::send:
      return cat({"sends from ", stages()});
    case step_op::receive:
      return cat({e.transfer.kind == transfer_kind::activation ? "activations" : "gradients", " from ", stages()});
    case step_op::gather:
      return "the gather of " + unit;
    case step_op::release:
      return "the release of " + unit;
    case step_op::reduce:
      return "the reduction of " + unit;
    case step_op::reduce_copies:
      return "the reduction of the copies of " + unit;
    case step_op::reduce_ties:
      return cat({"the reduction of ", unit, " over tied stages"});
    case step_op::update:
      return "the update of " + unit;
    default:
      return "the norm";
  }
}

}  // namespace detail

/// Returns the part of rank `rank` of a step that waited longest for communication over `axes`; of no seconds where
/// none did. `units` are the names of the step's units; those of other ranks' are not asked for.
inline step_wait longest_wait(const step_schedule& step, int rank, const wait_book& waits, std::string_view axes,
                              const std::vector<std::string>& units) {
  const std::vector<step_entry>& program = step.programs[static_cast<std::size_t>(rank)];
  const auto name = [&](std::size_t place) {
    return place < program.size() ? detail::name_in_waits(program[place], units) : "the end of the step";
  };
  std::vector<step_wait> parts;
  for (std::size_t place = 0; place < waits.places().size(); ++place)
    for (const wait_book::entry& e : waits.places()[place]) {
      if (e.axes != axes) continue;
      step_wait wait{name(place), {}, e.seconds};
      if (e.started < 0)
        wait.what = "what was started outside of steps";
      else if (e.started != static_cast<int>(place))
        wait.what = name(static_cast<std::size_t>(e.started));
      if (wait.what == wait.who) wait.what.clear();
      std::size_t i = 0;
      while (i < parts.size() && (parts[i].who != wait.who || parts[i].what != wait.what)) ++i;
      if (i == parts.size())
        parts.push_back(wait);
      else
        parts[i].seconds += wait.seconds;
    }
  step_wait longest;
  for (const step_wait& w : parts)
    if (w.seconds > longest.seconds) longest = w;
  return longest;
}

}  // namespace plait
