// The definitions of wait_book.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "plait/core/compiled.hpp"

namespace plait {

PLAIT_INLINE void wait_book::at(int place) {
  place_ = place;
  if (place >= static_cast<int>(places_.size())) places_.resize(static_cast<std::size_t>(place) + 1);
}

PLAIT_INLINE void wait_book::add(int started, const std::string& axes, double seconds) {
  all_ += seconds;
  if (place_ < 0) return;
  std::vector<entry>& here = places_[static_cast<std::size_t>(place_)];
  for (entry& e : here)
    if (e.started == started && e.axes == axes) {
      e.seconds += seconds;
      return;
    }
  here.push_back({started, axes, seconds});
}

}  // namespace plait
