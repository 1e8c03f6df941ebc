// A mesh as a type and as a value, and the arithmetic between ranks, coordinates and groups.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "plait/core/containers.hpp"
#include "plait/core/tag.hpp"

namespace plait {

/// The most axes of one mesh, and the most axes that may shard one dim.
inline constexpr std::size_t max_axes = 6;

/// Axes in order, the first one major: neighbours along the last axis have adjacent rank numbers.
using axis_list = static_vector<axis_id, max_axes>;

/// An extent that is known only at run time.
inline constexpr std::int64_t dynamic = -1;

/// One direction of a mesh: a tag and its extent (number of ranks along it), static or `dynamic`.
template <axis_like Tag, std::int64_t Extent = dynamic>
struct axis {
  static_assert(Extent == dynamic || Extent >= 1,
                "an axis' extent is a number of ranks: at least 1, or plait::dynamic");
  using tag = Tag;
  static constexpr std::int64_t extent = Extent;
};

/// The value of a mesh: axes with extents. Ranks are numbered row-major, the last axis fastest.
struct mesh_shape {
  axis_list axes;
  static_vector<std::int64_t, max_axes> extents;

  constexpr void add(axis_id axis, std::int64_t extent) {
    axes.push_back(axis);
    extents.push_back(extent);
  }
  constexpr bool has(axis_id axis) const { return axes.contains(axis); }
  /// Number of ranks along `axis`; 1 if the mesh lacks the axis.
  constexpr std::int64_t extent(axis_id axis) const {
    const int i = axes.find(axis);
    return i < 0 ? 1 : extents[static_cast<std::size_t>(i)];
  }
  /// Number of ranks of the group that the axes span together.
  constexpr std::int64_t size(const axis_list& group) const {
    std::int64_t n = 1;
    for (axis_id axis : group) n *= extent(axis);
    return n;
  }
  constexpr std::int64_t size() const { return size(axes); }

  /// Coordinate of `rank` along `axis`; 0 if the mesh lacks the axis.
  constexpr std::int64_t coordinate(std::int64_t rank, axis_id axis) const {
    for (std::size_t i = axes.size(); i-- > 0;) {
      if (axes[i] == axis) return rank % extents[i];
      rank /= extents[i];
    }
    return 0;
  }
  /// Index of `rank` in the group that `group` spans, the first axis major. It is the index of the rank's shard if a
  /// dim is sharded over those axes in that order.
  constexpr std::int64_t index_in(std::int64_t rank, const axis_list& group) const {
    std::int64_t index = 0;
    for (axis_id axis : group) index = index * extent(axis) + coordinate(rank, axis);
    return index;
  }
  /// A number that identifies the group of `rank`: the index over all axes outside `group`.
  constexpr std::int64_t group_of(std::int64_t rank, const axis_list& group) const {
    return index_in(rank, others(group));
  }
  /// The axes of `group` in the mesh's order.
  constexpr axis_list in_order(const axis_list& group) const {
    axis_list ordered;
    for (axis_id axis : axes)
      if (group.contains(axis)) ordered.push_back(axis);
    return ordered;
  }
  constexpr axis_list others(const axis_list& group) const {
    axis_list rest;
    for (axis_id axis : axes)
      if (!group.contains(axis)) rest.push_back(axis);
    return rest;
  }

  friend constexpr bool operator==(const mesh_shape&, const mesh_shape&) = default;
};

namespace detail {

/// Whether differ(a, b) holds for every pair of axes.
template <class Differ>
constexpr bool all_differ(const axis_list& axes, Differ differ) {
  for (std::size_t i = 0; i < axes.size(); ++i)
    for (std::size_t j = i + 1; j < axes.size(); ++j)
      if (!differ(axes[i], axes[j])) return false;
  return true;
}

}  // namespace detail

/// A device mesh as a type: `mesh<axis<dp>, axis<tp, 4>>`. As in `std::mdspan`, only dynamic extents are stored; the
/// constructor takes them in order: `mesh<axis<dp>, axis<tp, 4>> m{2};`.
template <class... Axes>
struct mesh {
  static_assert(sizeof...(Axes) <= max_axes, "a mesh has at most plait::max_axes axes");
  using tags = type_list<typename Axes::tag...>;
  static constexpr std::size_t rank = sizeof...(Axes);
  static constexpr std::size_t rank_dynamic = (std::size_t{0} + ... + (Axes::extent == dynamic ? 1 : 0));
  static constexpr axis_list axes{[] {
    axis_list list;
    (list.push_back(axis_of<typename Axes::tag>), ...);
    return list;
  }()};
  static constexpr bool distinct = detail::all_differ(axes, [](axis_id a, axis_id b) { return !(a == b); });
  static constexpr bool ordered =
      detail::all_differ(axes, [](axis_id a, axis_id b) { return before(a, b) || before(b, a); });
  static_assert(distinct, "a mesh names each axis once");
  static_assert(!distinct || ordered, "two axes of a mesh have the same name: give each axis_tag its own");

  constexpr mesh()
    requires(rank_dynamic == 0)
  {}
  template <class... Extents>
    requires(sizeof...(Extents) == rank_dynamic && rank_dynamic > 0 &&
             (std::convertible_to<Extents, std::int64_t> && ...))
  constexpr explicit mesh(Extents... extents) : dynamic_{static_cast<std::int64_t>(extents)...} {}

  constexpr mesh_shape shape() const {
    mesh_shape result;
    std::size_t next = 0;
    (result.add(axis_of<typename Axes::tag>, Axes::extent == dynamic ? dynamic_[next++] : Axes::extent), ...);
    return result;
  }
  /// The compile-time shape: every dynamic extent is `dynamic`.
  static constexpr mesh_shape static_shape() {
    mesh_shape result;
    (result.add(axis_of<typename Axes::tag>, Axes::extent), ...);
    return result;
  }
  constexpr std::int64_t size() const { return shape().size(); }

 private:
  std::int64_t dynamic_[rank_dynamic == 0 ? 1 : rank_dynamic]{};
};

template <class T>
inline constexpr bool is_mesh = false;
template <class... Axes>
inline constexpr bool is_mesh<mesh<Axes...>> = true;
template <class T>
concept mesh_like = is_mesh<T>;

}  // namespace plait
