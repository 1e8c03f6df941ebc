// The clock of communication, and the time in which at least one of several operations is under way. What it measures
// is kept in comm/ledger.hpp by comm/any_communicator.hpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "plait/version.hpp"

namespace plait {

/// Seconds of a clock that never goes back; its zero is arbitrary but the same for all threads of a process.
inline double comm_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The length of the union of spans of time, which are told in any order while operations overlap: two that are under
/// way together count once.
class busy_time {
 public:
  /// An operation begins whose span is reported later: `last` says that nothing more comes of it.
  void open() { ++open_; }
  void last();
  /// Adds a span, in seconds of one clock.
  void add(double from, double to);
  /// The length of the union of what was told.
  double seconds() const;
  /// Starts at 0 again. What is open stays open, and counts with its whole length once it is reported.
  void clear() {
    total_ = 0;
    spans_.clear();
  }

 private:
  static constexpr std::size_t most = 512;

  void merge();
  double sum() const {
    double length = 0;
    for (const auto& [from, to] : spans_) length += to - from;
    return length;
  }

  double total_ = 0;
  int open_ = 0;
  std::vector<std::pair<double, double>> spans_;  ///< of the time since anything was open without a break
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/comm/clock.ipp"  // IWYU pragma: keep
#endif
