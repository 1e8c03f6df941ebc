// The times of all actions of a step, simulated or measured, in one form for drawings and traces. It is no schedule:
// orders are in schedule/schedule.hpp. Next: observe/pipeline_svg.hpp, observe/trace.hpp.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/schedule/simulate.hpp"

namespace plait {

/// When each rank did what, simulated or measured: what is drawn (`observe/pipeline_svg.hpp`) and traced
/// (`observe/trace.hpp`). Each rank's actions are in the order of time; any unit, any origin.
struct pipeline_timeline {
  std::string title;
  std::string unit;  ///< of the times, as in "ms"; empty for unit costs
  pipeline_shape shape;
  std::vector<std::vector<timed_action>> ranks;

  double begin() const {
    double first = 0;
    bool any = false;
    for (const auto& mine : ranks)
      if (!mine.empty()) {
        first = any ? std::min(first, mine.front().start) : mine.front().start;
        any = true;
      }
    return first;
  }
  double end() const {
    double last = begin();
    for (const auto& mine : ranks)
      if (!mine.empty()) last = std::max(last, mine.back().end);
    return last;
  }
  double busy(std::size_t rank) const {
    double sum = 0;
    for (const timed_action& a : ranks[rank]) sum += a.end - a.start;
    return sum;
  }
  /// Share of the rank's time, from the first start of all to the last end of all, that it idles.
  double idle(std::size_t rank) const { return end() > begin() ? 1 - busy(rank) / (end() - begin()) : 0; }
  /// ... of all ranks' time.
  double idle() const {
    double sum = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r) sum += idle(r);
    return ranks.empty() ? 0 : sum / static_cast<double>(ranks.size());
  }
  /// The largest share of a rank's own span, from its first start to its last end, that it idles.
  double span_idle() const {
    double worst = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r)
      if (!ranks[r].empty())
        if (const double span = ranks[r].back().end - ranks[r].front().start; span > 0)
          worst = std::max(worst, 1 - busy(r) / span);
    return worst;
  }
};

/// The simulated timeline of a schedule.
inline pipeline_timeline timeline_of(const schedule& s, const schedule_costs& costs = {}, std::string unit = "") {
  std::string title = cat({s.name.str(), ", ", s.shape.ranks, " ranks"});
  if (s.shape.chunks > 1) append(title, {" with ", s.shape.chunks, " chunks each"});
  append(title, {", ", s.shape.microbatches, " microbatches"});
  return {std::move(title), std::move(unit), s.shape, simulate(s, costs).ranks};
}

}  // namespace plait
