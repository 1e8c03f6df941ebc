// Lists of types: an element by its index, lists joined, and `always_false` for texts of a `static_assert`.
// A mesh and a spec keep their tags in such lists: layout/mesh.hpp, layout/spec.hpp.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/version.hpp"

namespace plait {

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

/// False, but only once `Ts` are known: a `static_assert(always_false<T>)` in a template fires when it is instantiated.
template <class...>
inline constexpr bool always_false = false;

}  // namespace plait

#include "plait/core/macros_on.hpp"
