// The refusal of two parameters in one memory of the caller's, whose gradient would be reduced and whose values would
// be updated twice. One parameter that several layers use is none: `linear_options::tied`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// The arrays of callers that parameters use, by their addresses.
class memory_users {
 public:
  /// Throws, with both names, where the parameter shares memory of the caller's with one that was added before. One
  /// that is added again is the same, and a frozen one changes nothing.
  template <class Parameter>
  void add(const Parameter& p) {
    if (!p.trainable()) return;
    p.visit_callers_memory([&](const char* what, const auto* begin, std::int64_t elements) {
      add(&p, p.name(), what, begin, static_cast<std::size_t>(elements) * sizeof *begin);
    });
  }
  /// Adds an array of an owner that is known by its name alone.
  void add(const std::string& name, const void* begin, std::size_t bytes) {
    add(nullptr, name, "values", begin, bytes);
  }
  void clear() { users_.clear(); }

 private:
  struct user {
    std::uintptr_t end;
    const void* parameter;
    std::string name;
    const char* what;
  };

  void add(const void* parameter, const std::string& name, const char* what, const void* memory, std::size_t bytes) {
    if (bytes == 0) return;
    const auto begin = reinterpret_cast<std::uintptr_t>(memory), end = begin + bytes;
    const auto next = users_.lower_bound(begin);
    const auto check = [&](const auto& at) {
      const user& other = at->second;
      if (at->first >= end || begin >= other.end) return;
      if (parameter == other.parameter && name == other.name && std::string_view(what) == other.what) return;
      fail({"the ", what, " of parameter ", name, " share memory of the caller's with the ", other.what,
            " of parameter ", other.name,
            ", and would be changed twice in a step; let one layer use the parameter of the other "
            "(linear_options::tied), or give each memory of its own"});
    };
    if (next != users_.end()) check(next);
    if (next != users_.begin()) check(std::prev(next));
    users_.try_emplace(begin, user{end, parameter, name, what});
  }

  std::map<std::uintptr_t, user> users_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
