// How long a rank's communication was under way and how long the rank waited for it, by axes, since some moment; and
// the same of all ranks. Bytes and calls are in comm/ledger.hpp, from which this is taken.
#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "plait/comm/ledger.hpp"

namespace plait {

/// Returns the share of `seconds` under way in which the rank did not wait, 0 to 1; NaN where nothing was under way, or
/// where it was not measured.
inline double hidden_share(double seconds, double waited) {
  return seconds > 0 ? 1 - waited / seconds : std::numeric_limits<double>::quiet_NaN();
}

/// The communication of one rank over the groups of some axes.
struct axis_times {
  std::string axes;    ///< as the ledger names them: "dp", "cp+dp"
  double seconds = 0;  ///< under way; NaN: not measured, as calls only enqueue work on a device
  double waited = 0;   ///< of that, spent inside the communicator; NaN if unknown

  double hidden() const { return hidden_share(seconds, waited); }
};

/// The communication of all ranks over the groups of some axes.
struct axis_communication {
  std::string axes;
  double seconds = 0;   ///< under way, mean over the ranks that have such a group; NaN: not measured
  double waited = 0;    ///< of that, spent inside the communicator, mean over those ranks; NaN if unknown
  double worst = 0;     ///< the least hidden share of a rank; NaN if unknown
  int worst_rank = -1;  ///< which rank has it

  double hidden() const { return hidden_share(seconds, waited); }
};

/// Reads a ledger for the time since a moment.
class communication_clock {
 public:
  /// The ledger must outlive it. Time begins now.
  explicit communication_clock(const ledger& book) : book_(&book) { begin(); }

  /// Time begins anew. A ledger that was cleared since the last time needs it too.
  void begin() { before_ = times(); }

  /// Returns the times since then over each axes along which anything was called, in the ledger's order. What is still
  /// under way counts once it has been waited for.
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
      t.seconds = r.under_way.seconds();
      if (t.seconds > 0)
        for (const ledger::entry& e : r.kinds) t.waited += e.seconds;
      if (t.seconds > 0 && !r.timed) t.seconds = t.waited = std::numeric_limits<double>::quiet_NaN();
    }
    return all;
  }

  const ledger* book_;
  std::vector<axis_times> before_;
};

}  // namespace plait
