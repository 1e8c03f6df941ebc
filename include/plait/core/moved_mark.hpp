// The mark by which an object knows that it was moved from, so that its calls can be refused.
#pragma once

#include <utility>

#include "plait/version.hpp"

namespace plait {

/// Set in an object that was moved from, until another is moved or copied into it. A member: copies and moves of the
/// object keep it right.
class moved_mark {
 public:
  moved_mark() = default;
  moved_mark(const moved_mark&) = default;
  moved_mark& operator=(const moved_mark&) = default;
  moved_mark(moved_mark&& from) noexcept : moved_(std::exchange(from.moved_, true)) {}
  moved_mark& operator=(moved_mark&& from) noexcept {
    moved_ = std::exchange(from.moved_, true);
    return *this;
  }

  bool moved() const { return moved_; }

 private:
  bool moved_ = false;
};

}  // namespace plait
