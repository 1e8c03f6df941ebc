// The times of each rank's communication, by axes, and their mean and worst over all ranks.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/core/error.hpp"
#include "plait/core/text.hpp"
#include "plait/device/device.hpp"

namespace plait {

/// Returns the share of the `seconds` of communication in which the rank did not wait, 0 to 1; NaN if there was none,
/// or if it was not measured.
inline double hidden_share(double seconds, double waited) {
  return seconds > 0 ? 1 - waited / seconds : std::numeric_limits<double>::quiet_NaN();
}

/// The communication of one rank over the groups of some axes.
struct axis_times {
  fixed_text<64> axes;  ///< names as in the ledger: "dp", "cp+dp"
  double seconds = 0;   ///< from start to end of calls; NaN: not measured, because calls only enqueue work on a device
  double waited = 0;    ///< part of `seconds` that the rank waited in the communicator; NaN if unknown

  double hidden() const { return hidden_share(seconds, waited); }
};

/// The communication of all ranks over the groups of some axes.
struct axis_communication {
  std::string axes;
  double seconds = 0;  ///< from start to end of calls, mean over the ranks with the group; NaN: not measured
  double waited = 0;   ///< part of `seconds` that ranks waited in the communicator, mean of these ranks; NaN if unknown
  double worst = 0;    ///< the least hidden share of a rank; NaN if unknown
  int worst_rank = -1;  ///< the rank with the least hidden share

  double hidden() const { return hidden_share(seconds, waited); }
};

/// Reads the communication since a moment from a ledger.
class communication_clock {
 public:
  /// Begins now. The ledger must outlive the clock.
  explicit communication_clock(const ledger& book) : book_(&book) { begin(); }

  /// Begins again. Also needed after the ledger was cleared.
  void begin() { before_ = times(); }

  /// Returns the times since then for each set of axes with calls, in the ledger's order. An unfinished call counts
  /// after it has been waited for.
  std::vector<axis_times> since() const {
    std::vector<axis_times> now = times(), out;
    for (std::size_t i = 0; i < now.size(); ++i) {
      if (i < before_.size()) now[i].seconds -= before_[i].seconds, now[i].waited -= before_[i].waited;
      if (!(now[i].seconds <= 0)) out.push_back(now[i]);
    }
    return out;
  }

 private:
  std::vector<axis_times> times() const {
    std::vector<axis_times> all;
    for (const ledger::row& r : book_->rows) {
      axis_times& t = all.emplace_back(axis_times{r.label});
      if (t.axes.view() != r.label) fail({"communication_clock: the label '", r.label, "' is too long"});
      t.seconds = r.in_flight.seconds();
      if (t.seconds > 0)
        for (const ledger::entry& e : r.kinds) t.waited += e.seconds;
      if (t.seconds > 0 && !r.timed) t.seconds = t.waited = std::numeric_limits<double>::quiet_NaN();
    }
    return all;
  }

  const ledger* book_;
  std::vector<axis_times> before_;
};

/// Returns the mean and the worst rank of the times of all ranks, in the order in which ranks name axes. The result is
/// equal on every rank. Collective over `ranks`, so call it between steps, and not after every step:
///
///     communication_clock clock(world.ledger());
///     step.run(ctx);
///     for (const axis_communication& c : communication_of_ranks(device, world.root(), clock.since())) ...
///
/// It takes two collectives, or one if the caller gives the largest number of records of a rank. Here ranks also wait
/// for gathers that a step has started. A call in `training_step::on_norm` comes before these gathers.
template <compute_device Device>
std::vector<axis_communication> communication_of_ranks(Device& device, any_communicator& ranks,
                                                       const std::vector<axis_times>& mine, std::size_t most = 0) {
  std::vector<axis_times> own = mine;
  if (own.size() < most) own.resize(most);  // pads with records without a label
  const std::vector<std::vector<axis_times>> all =
      most > 0 ? gather_equal_records(device, ranks, own) : gather_records(device, ranks, own);
  std::vector<axis_communication> out;
  std::vector<double> having;
  for (std::size_t r = 0; r < all.size(); ++r)
    for (const axis_times& t : all[r]) {
      const std::string_view axes = t.axes.view();
      if (axes.empty()) continue;
      std::size_t i = 0;
      while (i < out.size() && out[i].axes != axes) ++i;
      if (i == out.size()) {
        out.push_back({std::string(axes), 0, 0, std::numeric_limits<double>::infinity()});
        having.push_back(0);
      }
      axis_communication& c = out[i];
      ++having[i];
      c.seconds += t.seconds;
      c.waited += t.waited;
      if (t.hidden() < c.worst) c.worst = t.hidden(), c.worst_rank = static_cast<int>(r);
    }
  for (std::size_t i = 0; i < out.size(); ++i) {
    out[i].seconds /= having[i];
    out[i].waited /= having[i];
    if (out[i].worst_rank < 0) out[i].worst = std::numeric_limits<double>::quiet_NaN();
  }
  return out;
}

}  // namespace plait
