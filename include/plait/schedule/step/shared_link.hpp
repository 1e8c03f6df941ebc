// A rank's link in a simulated step: gathers, reductions and those of copies in queues that share its bandwidth.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// A rank's link: a queue of gathers, one of reductions and one of the reductions of copies. Those that have something
/// get equal parts of the bandwidth.
class shared_link {
 public:
  static constexpr std::size_t queues = 3;
  struct use {
    double begin, end;
  };

  explicit shared_link(double bandwidth) : bandwidth_(bandwidth) {}

  /// Starts a transfer at a time, which must not be before earlier ones; returns its number.
  std::size_t post(int queue, double at, double bytes, double latency) {
    advance(at);
    ends_.push_back(-1);
    begins_.push_back(queues_[queue].empty() ? at : -1);
    queues_[queue].push_back({ends_.size() - 1, bandwidth_ > 0 ? bytes + latency * bandwidth_ : 0});
    return ends_.size() - 1;
  }
  /// When it went on the link, and when it was over; negative: not by now.
  use known_use_of(std::size_t number) const { return {begins_[number], ends_[number]}; }
  /// Returns when it is over.
  double end_of(std::size_t number) {
    while (ends_[number] < 0) finish_next();
    return ends_[number];
  }
  void advance(double until) {
    while (now_ < until) {
      if (used_queues() == 0) {
        now_ = until;
        return;
      }
      if (next_end() > until) {
        move(until - now_);
        return;
      }
      finish_next();
    }
  }
  /// The times when it was in use.
  const std::vector<use>& uses() const { return uses_; }

 private:
  struct queued {
    std::size_t number;
    double left;  ///< bytes
  };

  int used_queues() const {
    int used = 0;
    for (const auto& q : queues_) used += q.empty() ? 0 : 1;
    return used;
  }
  double rate() const { return bandwidth_ / used_queues(); }
  double next_end() const {
    double least = -1;
    for (const auto& q : queues_)
      if (!q.empty() && (least < 0 || q.front().left < least)) least = q.front().left;
    return bandwidth_ > 0 ? now_ + least / rate() : now_;
  }
  void move(double time) {
    if (time <= 0) return;
    const double bytes = time * rate();
    for (auto& q : queues_)
      if (!q.empty()) q.front().left = std::max(0.0, q.front().left - bytes);  // rounding must not go below
    if (!uses_.empty() && uses_.back().end == now_)
      uses_.back().end = now_ + time;
    else
      uses_.push_back({now_, now_ + time});
    now_ += time;
  }
  void finish_next() {
    double least = -1;
    std::size_t first = 0;
    for (std::size_t q = 0; q < queues; ++q)
      if (!queues_[q].empty() && (least < 0 || queues_[q].front().left < least))
        least = queues_[q].front().left, first = q;
    if (bandwidth_ > 0) move(least / rate());
    ends_[queues_[first].front().number] = now_;
    queues_[first].pop_front();
    if (!queues_[first].empty()) begins_[queues_[first].front().number] = now_;
  }

  double bandwidth_, now_ = 0;
  std::deque<queued> queues_[queues];
  std::vector<double> begins_, ends_;  ///< negative: not yet
  std::vector<use> uses_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
