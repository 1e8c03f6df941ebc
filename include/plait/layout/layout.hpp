// How a tensor lies on a mesh, as a value: its states, its dual, and the part that a rank holds. As a type it is a spec
// (layout/spec.hpp).
#pragma once

#include <cstdint>

#include "plait/core/box.hpp"
#include "plait/core/text.hpp"
#include "plait/layout/mesh.hpp"

namespace plait {

/// The state of one mesh axis for one value.
///
/// * invariant: equal on all ranks along the axis, and so is the gradient.
/// * replicated: equal on all ranks, and the gradient is partial: each rank computes its own contribution.
/// * varying: some dim is sharded over the axis.
/// * partial: each rank holds a term of a pending sum.
enum class state : std::uint8_t { invariant, replicated, varying, partial };

constexpr const char* name_of(state s) {
  constexpr const char* names[] = {"invariant", "replicated", "varying", "partial"};
  return names[static_cast<std::size_t>(s)];
}

/// The state of the gradient of a value in state `s`.
constexpr state dual(state s) {
  return s == state::replicated ? state::partial : s == state::partial ? state::replicated : s;
}

/// A dim and the axes it is sharded over, the first one major. No axes: the dim is whole.
struct dim_placement {
  dim_id dim;
  axis_list axes;
  friend constexpr bool operator==(const dim_placement&, const dim_placement&) = default;
};

using dim_list = static_vector<dim_id, max_dims>;

/// How a tensor lies on a mesh, as a value: the one thing that all rules and plans compute with. Dims are in memory
/// order (row-major). An axis in none of the four places is invariant too, but unmentioned, which a layer's boundary
/// refuses.
struct layout {
  static_vector<dim_placement, max_dims> dims;
  axis_list replicated;  // these three are sorted by name, so that equal layouts compare equal
  axis_list partial;
  axis_list invariant;

  constexpr int find(dim_id dim) const {
    for (std::size_t i = 0; i < dims.size(); ++i)
      if (dims[i].dim == dim) return static_cast<int>(i);
    return -1;
  }
  constexpr bool has(dim_id dim) const { return find(dim) >= 0; }
  /// The axes `dim` is sharded over; none if it is whole or absent.
  constexpr axis_list axes_of(dim_id dim) const {
    const int i = find(dim);
    return i < 0 ? axis_list{} : dims[static_cast<std::size_t>(i)].axes;
  }
  /// The dim that `axis` shards, or none.
  constexpr dim_id sharded_by(axis_id axis) const {
    for (const dim_placement& p : dims)
      if (p.axes.contains(axis)) return p.dim;
    return {};
  }
  constexpr state state_of(axis_id axis) const {
    if (partial.contains(axis)) return state::partial;
    if (replicated.contains(axis)) return state::replicated;
    return sharded_by(axis) ? state::varying : state::invariant;
  }
  constexpr bool mentions(axis_id axis) const { return invariant.contains(axis) || state_of(axis) != state::invariant; }
  constexpr dim_list dim_order() const {
    dim_list list;
    for (const dim_placement& p : dims) list.push_back(p.dim);
    return list;
  }
  /// Every axis that the layout mentions.
  constexpr axis_list mentioned() const {
    axis_list list;
    for (const dim_placement& p : dims)
      for (axis_id axis : p.axes) list.push_back(axis);
    for (const axis_list* set : {&replicated, &partial, &invariant})
      for (axis_id axis : *set) list.push_back(axis);
    return list;
  }

  /// Puts `axis`, which must shard no dim, into a state other than varying.
  constexpr void set(axis_id axis, state s) {
    for (axis_list* set : {&replicated, &partial, &invariant})
      if (const int i = set->find(axis); i >= 0) set->erase(static_cast<std::size_t>(i));
    axis_list& target = s == state::replicated ? replicated : s == state::partial ? partial : invariant;
    std::size_t at = 0;
    while (at < target.size() && before(target[at], axis)) ++at;
    target.insert(at, axis);
  }
  /// Shards `dim` over `axis`, innermost.
  constexpr void append(dim_id dim, axis_id axis) {
    for (axis_list* set : {&replicated, &partial, &invariant})
      if (const int i = set->find(axis); i >= 0) set->erase(static_cast<std::size_t>(i));
    dims[static_cast<std::size_t>(find(dim))].axes.push_back(axis);
  }

  friend constexpr bool operator==(const layout&, const layout&) = default;
};

/// Whether two placements are equal. An axis that is invariant by mention equals one that is invariant by default.
constexpr bool equivalent(const layout& a, const layout& b) {
  return a.dims == b.dims && a.replicated == b.replicated && a.partial == b.partial;
}

/// The layout of the gradient of a value with layout `a`.
constexpr layout dual(layout a) {
  const axis_list replicated = a.replicated;
  a.replicated = a.partial;
  a.partial = replicated;
  return a;
}

/// The axes of `a` and `b` together, each once.
constexpr axis_list union_of(const axis_list& a, const axis_list& b) {
  axis_list all = a;
  for (axis_id axis : b)
    if (!all.contains(axis)) all.push_back(axis);
  return all;
}

/// Global sizes of dims: one table for a whole model.
struct dim_sizes {
  static_vector<dim_id, 24> dims;
  static_vector<std::int64_t, 24> sizes;

  constexpr void set(dim_id dim, std::int64_t size) {
    if (const int i = dims.find(dim); i >= 0) {
      sizes[static_cast<std::size_t>(i)] = size;
      return;
    }
    dims.push_back(dim);
    sizes.push_back(size);
  }
  /// Global size of `dim`, or -1 when the table lacks it.
  constexpr std::int64_t of(dim_id dim) const {
    const int i = dims.find(dim);
    return i < 0 ? -1 : sizes[static_cast<std::size_t>(i)];
  }
};

/// The part of the tensor that `rank` holds. Sizes must divide by the ranks that shard them (`check_divides`).
constexpr box local_box(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes, std::int64_t rank) {
  box b;
  for (const dim_placement& p : a.dims) {
    const std::size_t d = static_cast<std::size_t>(b.dims++);
    b.global[d] = sizes.of(p.dim);
    b.local[d] = b.global[d] / mesh.size(p.axes);
    b.offset[d] = mesh.index_in(rank, p.axes) * b.local[d];
  }
  return b;
}

/// Elements that each rank holds.
constexpr std::int64_t local_elements(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes) {
  std::int64_t n = 1;
  for (const dim_placement& p : a.dims) n *= sizes.of(p.dim) / mesh.size(p.axes);
  return n;
}

/// Returns the axes of several ranks that shard some dim, in the mesh's order.
constexpr axis_list sharding_axes(const layout& a, const mesh_shape& mesh) {
  axis_list axes;
  for (axis_id axis : mesh.axes)
    if (mesh.extent(axis) > 1 && a.sharded_by(axis)) axes.push_back(axis);
  return axes;
}

}  // namespace plait
