// Memory of the program's that serves several parameters in turn: which of them has its numbers there now.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// The use of some memory by one parameter.
struct memory_use {
  const std::string* name;
  const bool* adds;    ///< whether it has begun a sum there that is not reduced; null: it has values there
  bool valid = false;  ///< whether its numbers are still there
  std::uintptr_t at = 0;
};

/// The uses of a rank's memory, by addresses.
class lent_memory {
 public:
  /// `by` puts its numbers into these bytes, so that other numbers there are gone. Throws where they are a gradient
  /// that was not reduced.
  void take(const void* memory, std::size_t bytes, const std::shared_ptr<memory_use>& by) {
    const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
    if (begin == end) return;
    if (const auto before = uses_.find(by->at); before != uses_.end() && before->second.second.lock() == by)
      uses_.erase(before);
    auto at = uses_.lower_bound(begin);
    if (at != uses_.begin() && std::prev(at)->second.first > begin) --at;
    while (at != uses_.end() && at->first < end) {
      if (const auto other = at->second.second.lock(); other && other != by) {
        if (other->adds && *other->adds)
          fail({"parameter ", *by->name, ": its numbers would overwrite the gradient of ", *other->name,
                ", to which passes have added; call reduce(ctx) for that one before, or give each memory of its own"});
        other->valid = false;
      }
      at = uses_.erase(at);
    }
    uses_.try_emplace(begin, end, by);
    by->valid = true, by->at = begin;
  }

 private:
  std::map<std::uintptr_t, std::pair<std::uintptr_t, std::weak_ptr<memory_use>>> uses_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
