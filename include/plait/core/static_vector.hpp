// A vector of fixed capacity for constant expressions: lists of axes and dims, steps of a plan. All its elements are
// constructed from the start, so they need a default constructor.
#pragma once

#include <cstddef>
#include <stdexcept>

#include "plait/version.hpp"

namespace plait {

/// Called when a fixed capacity is exceeded. Not constexpr on purpose: in a constant expression the call itself is the
/// compile error, and its name is what the user reads.
[[noreturn]] inline void static_vector_capacity_exceeded() {
  throw std::length_error("more axes, dims or steps than plait has room for");
}

/// A vector of at most `Capacity` elements without allocation, usable in constant expressions and as a member of types
/// that are compared memberwise.
template <class T, std::size_t Capacity>
struct static_vector {
  T items[Capacity]{};
  std::size_t count = 0;

  constexpr static_vector() = default;
  template <class... Args>
    requires(sizeof...(Args) > 0 && sizeof...(Args) <= Capacity)
  constexpr explicit static_vector(const Args&... args) {
    (push_back(args), ...);
  }

  constexpr std::size_t size() const { return count; }
  constexpr bool empty() const { return count == 0; }
  constexpr T* begin() { return items; }
  constexpr T* end() { return items + count; }
  constexpr const T* begin() const { return items; }
  constexpr const T* end() const { return items + count; }
  constexpr T& operator[](std::size_t i) { return items[i]; }
  constexpr const T& operator[](std::size_t i) const { return items[i]; }
  constexpr T& back() { return items[count - 1]; }
  constexpr const T& back() const { return items[count - 1]; }

  constexpr void push_back(const T& value) {
    if (count == Capacity) static_vector_capacity_exceeded();
    items[count++] = value;
  }
  constexpr void pop_back() { items[--count] = T{}; }
  constexpr void insert(std::size_t at, const T& value) {
    push_back(value);
    for (std::size_t i = count - 1; i > at; --i) items[i] = items[i - 1];
    items[at] = value;
  }
  constexpr void erase(std::size_t at) {
    for (std::size_t i = at + 1; i < Capacity && i < count; ++i) items[i - 1] = items[i];
    pop_back();
  }

  /// Index of the first element equal to `value`, or -1.
  constexpr int find(const T& value) const {
    for (std::size_t i = 0; i < count; ++i)
      if (items[i] == value) return static_cast<int>(i);
    return -1;
  }
  constexpr bool contains(const T& value) const { return find(value) >= 0; }

  friend constexpr bool operator==(const static_vector& a, const static_vector& b) {
    if (a.count != b.count) return false;
    for (std::size_t i = 0; i < a.count; ++i)
      if (!(a.items[i] == b.items[i])) return false;
    return true;
  }
};

}  // namespace plait
