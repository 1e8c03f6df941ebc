// The clock of communication, and the time in which at least one of several operations is under way. What it measures
// is kept in comm/ledger.hpp by comm/accounting.hpp.
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
  /// An operation begins of which a span will be told later: `last` says that nothing more comes of it.
  void open() { ++open_; }
  void last() {
    if (--open_ > 0) return;
    merge();
    total_ += sum();
    spans_.clear();
  }
  /// Adds a span, in seconds of one clock.
  void add(double from, double to) {
    if (to <= from) return;
    if (open_ == 0) {
      total_ += to - from;
      return;
    }
    if (!spans_.empty() && spans_.back().first <= from && from <= spans_.back().second) {
      spans_.back().second = std::max(spans_.back().second, to);
      return;
    }
    spans_.emplace_back(from, to);
    if (spans_.size() % most == 0) merge();
  }
  /// The length of the union of what was told.
  double seconds() const {
    busy_time merged = *this;
    merged.merge();
    return total_ + merged.sum();
  }
  /// Starts at 0 again. What is open stays open, and counts with its whole length once it is told.
  void clear() {
    total_ = 0;
    spans_.clear();
  }

 private:
  static constexpr std::size_t most = 512;

  void merge() {
    if (spans_.size() < 2) return;
    std::sort(spans_.begin(), spans_.end());
    std::size_t end = 0;
    for (std::size_t i = 1; i < spans_.size(); ++i) {
      if (spans_[i].first <= spans_[end].second)
        spans_[end].second = std::max(spans_[end].second, spans_[i].second);
      else
        spans_[++end] = spans_[i];
    }
    spans_.resize(end + 1);
  }
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
