// The definitions of recorder.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait {

PLAIT_INLINE std::string bytes_text(std::uint64_t bytes) {
  if (bytes < 1024) return cat({bytes, " B"});
  const char* const units[] = {"KB", "MB", "GB", "TB", "PB"};
  double value = static_cast<double>(bytes) / 1024;
  int unit = 0;
  for (; value >= 1024 && unit < 4; ++unit) value /= 1024;
  char text[48];
  std::snprintf(text, sizeof text, "%.1f", value);
  std::string out = text;
  if (out.size() > 2 && out.compare(out.size() - 2, 2, ".0") == 0) out.resize(out.size() - 2);
  return cat({out, " ", units[unit]});
}

PLAIT_INLINE std::string flight_recorder::text(std::size_t most) const {
  std::string out;
  const std::uint64_t count = std::min<std::uint64_t>({next_, capacity, most});
  for (std::uint64_t i = next_ - count; i < next_; ++i) {
    const entry& e = entries_[i % capacity];
    if (!out.empty()) out += "; ";
    append(out, {e.name, " #", e.sequence, " on '", e.label.data(), "' ", bytes_text(e.bytes), " ",
                 name_of(e.now.load(std::memory_order_relaxed))});
  }
  return out.empty() ? "nothing" : out;
}

PLAIT_INLINE int recorder::label(std::string_view name) {
  for (std::size_t i = 0; i < labels_.size(); ++i) {
    if (labels_[i] == name) return static_cast<int>(i);
  }
  labels_.emplace_back(name);
  return static_cast<int>(labels_.size()) - 1;
}

PLAIT_INLINE std::uint64_t recorder::add(const event& e) {
  if (capacity_ == 0 || events_.size() < capacity_) {
    events_.push_back(e);
  } else {
    events_[place_of(added_)] = e;
  }
  return added_++;
}

PLAIT_INLINE std::vector<recorder::event> recorder::events() const {
  std::vector<event> out = events_;
  if (capacity_ != 0 && added() > capacity_) {
    std::rotate(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(added() % capacity_), out.end());
  }
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
