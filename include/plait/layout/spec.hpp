// Layouts as types: the words of specs, their canonical form, and `dual_t`. layout/check.hpp checks specs against a
// mesh.
#pragma once

#include <type_traits>
#include <utility>

#include "plait/core/containers.hpp"
#include "plait/layout/layout.hpp"

namespace plait {

/// In a spec, a dim alone is whole; `shard<dim, axes...>` splits it over axes, the first one major.
template <class Dim, class... Axes>
struct shard {};
/// The value is equal on all ranks of these axes, and each rank uses it in its own way, so the gradient is partial.
/// Some libraries use the word "replicated" for plait's `invariant`.
template <class... Axes>
struct replicate {};
/// Each rank of these axes holds a term of a pending sum. The gradient is replicated.
template <class... Axes>
struct partial {};
/// The value is equal on all ranks of these axes, and so is its gradient.
template <class... Axes>
struct invariant {};

/// `spec<...>` becomes this type: its dims in order, then replicate, partial and invariant, each at most once. Axes
/// inside these are sorted by name.
template <class... Items>
struct placed;

namespace detail {

template <class Item>
struct item_traits {
  using dims = type_list<>;
  using axes = type_list<>;
  static constexpr bool known = false;
  static constexpr void apply(layout&) {}
};
template <dim_like Dim, axis_like... Axes>
struct item_traits<shard<Dim, Axes...>> {
  using dims = type_list<Dim>;
  using axes = type_list<Axes...>;
  static constexpr bool known = true;
  static constexpr void apply(layout& a) {
    a.dims.push_back({dim_of<Dim>, {}});
    (a.dims.back().axes.push_back(axis_of<Axes>), ...);
  }
};
template <dim_like Dim>
struct item_traits<Dim> : item_traits<shard<Dim>> {};
template <state State, class... Axes>
struct state_item {
  using dims = type_list<>;
  using axes = type_list<Axes...>;
  static constexpr bool known = true;
  static constexpr void apply(layout& a) { (a.set(axis_of<Axes>, State), ...); }
};
template <axis_like... Axes>
struct item_traits<replicate<Axes...>> : state_item<state::replicated, Axes...> {};
template <axis_like... Axes>
struct item_traits<partial<Axes...>> : state_item<state::partial, Axes...> {};
template <axis_like... Axes>
struct item_traits<invariant<Axes...>> : state_item<state::invariant, Axes...> {};

template <class... Items>
constexpr layout layout_of_items() {
  layout a;
  (item_traits<Items>::apply(a), ...);
  return a;
}

/// The id of an axis or a dim.
template <class Tag>
constexpr auto id_of() {
  if constexpr (axis_like<Tag>)
    return axis_of<Tag>;
  else
    return dim_of<Tag>;
}
/// The index in `Tags` of the tag whose id is `id`; their number if there is none.
template <class Id, class... Tags>
constexpr std::size_t index_of(Id id, type_list<Tags...>) {
  std::size_t i = 0, found = sizeof...(Tags);
  ((found = found == sizeof...(Tags) && id_of<Tags>() == id ? i : found, ++i), ...);
  return found;
}
template <class... Tags>
constexpr bool each_once([[maybe_unused]] type_list<Tags...> all) {
  [[maybe_unused]] std::size_t i = 0;
  return ((index_of(id_of<Tags>(), all) == i++) && ...);
}

template <class Dim, class... Axes>
using shard_or_whole = std::conditional_t<sizeof...(Axes) == 0, Dim, shard<Dim, Axes...>>;

/// Builds `placed<...>` from the layout `Value::value`, given the tags that occur in it.
template <class Value, class Dims, class Axes>
struct place {
  static constexpr layout value = Value::value;

  template <std::size_t D, std::size_t... Is>
  static auto dim_item(std::index_sequence<Is...>)
      -> shard_or_whole<type_at<index_of(value.dims[D].dim, Dims{}), Dims>,
                        type_at<index_of(value.dims[D].axes[Is], Axes{}), Axes>...>;
  template <std::size_t... Ds>
  static auto dim_items(std::index_sequence<Ds...>)
      -> type_list<decltype(dim_item<Ds>(std::make_index_sequence<value.dims[Ds].axes.size()>{}))...>;

  template <template <class...> class Word, state State, std::size_t... Is>
  static auto state_items(std::index_sequence<Is...>) {
    if constexpr (sizeof...(Is) == 0) {
      return type_list<>{};
    } else {
      return type_list<Word<type_at<index_of(set_of(State)[Is], Axes{}), Axes>...>>{};
    }
  }
  static constexpr const axis_list& set_of(state s) {
    return s == state::replicated ? value.replicated : s == state::partial ? value.partial : value.invariant;
  }
  template <class List>
  struct wrap;
  template <class... Items>
  struct wrap<type_list<Items...>> {
    using type = placed<Items...>;
  };

  using type = typename wrap<concat<
      decltype(dim_items(std::make_index_sequence<value.dims.size()>{})),
      decltype(state_items<replicate, state::replicated>(std::make_index_sequence<value.replicated.size()>{})),
      decltype(state_items<partial, state::partial>(std::make_index_sequence<value.partial.size()>{})),
      decltype(state_items<invariant, state::invariant>(std::make_index_sequence<value.invariant.size()>{}))>>::type;
};

template <class... Items>
struct checked_spec {
  static_assert(!(false || ... || axis_like<Items>),
                "a bare axis in a spec: write shard<dim, axis>, replicate<axis>, partial<axis> or invariant<axis>");
  static_assert((axis_like<Items> || ...) || (item_traits<Items>::known && ...),
                "a spec lists dims, shard<dim, axes...>, replicate<axes...>, partial<axes...> and invariant<axes...>; "
                "inside, a dim comes first and axes follow");
  using dims = concat<typename item_traits<Items>::dims...>;
  using axes = concat<typename item_traits<Items>::axes...>;
  static constexpr bool once_each = each_once(dims{}) && each_once(axes{});
  static_assert(each_once(dims{}), "a spec names a dim twice");
  static_assert(each_once(axes{}), "a spec uses an axis twice: one axis has one state, and shards at most one dim");
  struct value_holder {
    static constexpr layout value = once_each ? layout_of_items<Items...>() : layout{};
  };
  using type = typename place<value_holder, dims, axes>::type;
};

}  // namespace detail

/// The layout of a tensor as a type, in canonical form: two specs with one meaning are one type. Dims are in memory
/// order, row-major.
template <class... Items>
using spec = typename detail::checked_spec<Items...>::type;

template <class... Items>
struct placed {
  using dims = concat<typename detail::item_traits<Items>::dims...>;
  using axes = concat<typename detail::item_traits<Items>::axes...>;
  static constexpr layout value = detail::layout_of_items<Items...>();
};

template <class T>
inline constexpr bool is_spec = false;
template <class... Items>
inline constexpr bool is_spec<placed<Items...>> = true;
template <class T>
concept spec_like = is_spec<T>;

template <spec_like Spec>
inline constexpr layout layout_v = Spec::value;

/// The spec of the layout `Value::value`, whose tags are among the tags of `Specs`.
template <class Value, class... Specs>
using spec_from = typename detail::place<Value, concat<typename Specs::dims...>, concat<typename Specs::axes...>>::type;

namespace detail {
template <class Spec>
struct dual_value {
  static constexpr layout value = dual(layout_v<Spec>);
};
}  // namespace detail

/// The spec of the gradient of a value with spec `Spec`.
template <spec_like Spec>
using dual_t = spec_from<detail::dual_value<Spec>, Spec>;

}  // namespace plait
