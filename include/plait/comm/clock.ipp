// The definitions of clock.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstddef>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

PLAIT_INLINE void busy_time::last() {
  if (--open_ > 0) return;
  merge();
  total_ += sum();
  spans_.clear();
}

PLAIT_INLINE void busy_time::add(double from, double to) {
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

PLAIT_INLINE double busy_time::seconds() const {
  busy_time merged = *this;
  merged.merge();
  return total_ + merged.sum();
}

PLAIT_INLINE void busy_time::merge() {
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

}  // namespace plait

#include "plait/core/macros_on.hpp"
