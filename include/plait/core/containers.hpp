// Small building blocks: a vector of fixed capacity, lists of types, and a mark of objects that were moved from.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/version.hpp"

namespace plait {

/// Called when a fixed capacity is exceeded. It is not constexpr on purpose: in a constant expression the call itself
/// is the compile error, and the user reads its name.
[[noreturn]] inline void static_vector_capacity_exceeded() {
  throw std::length_error("more axes, dims or steps than plait has room for");
}

/// A vector of at most `Capacity` elements that does not allocate. It can be used in constant expressions and as a
/// member of types that are compared memberwise.
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

/// A list of types: the tags of a mesh or a spec, or the facts of an error.
template <class... Ts>
struct type_list {
  static constexpr std::size_t size = sizeof...(Ts);
};

namespace detail {

template <std::size_t I, class T>
struct indexed {
  using type = T;
};
template <class Indices, class... Ts>
struct indexer;
template <std::size_t... Is, class... Ts>
struct indexer<std::integer_sequence<std::size_t, Is...>, Ts...> : indexed<Is, Ts>... {};
template <std::size_t I, class T>
indexed<I, T> select(const indexed<I, T>&);

template <std::size_t I, class List>
struct type_at_impl;
template <std::size_t I, class... Ts>
struct type_at_impl<I, type_list<Ts...>> {
  using type = typename decltype(select<I>(indexer<std::make_index_sequence<sizeof...(Ts)>, Ts...>{}))::type;
};

template <class... Lists>
struct concat_impl {
  using type = type_list<>;
};
template <class... Ts>
struct concat_impl<type_list<Ts...>> {
  using type = type_list<Ts...>;
};
template <class... Ts, class... Us, class... Rest>
struct concat_impl<type_list<Ts...>, type_list<Us...>, Rest...> : concat_impl<type_list<Ts..., Us...>, Rest...> {};

}  // namespace detail

template <std::size_t I, class List>
using type_at = typename detail::type_at_impl<I, List>::type;
template <class... Lists>
using concat = typename detail::concat_impl<Lists...>::type;

/// False, but dependent on `Ts`: a `static_assert(always_false<T>)` in a template fires when the template is
/// instantiated.
template <class...>
inline constexpr bool always_false = false;

/// A member that records that its object was moved from, until another object is moved or copied into it. It lets a
/// class refuse calls on such an object.
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

#include "plait/core/macros_on.hpp"
