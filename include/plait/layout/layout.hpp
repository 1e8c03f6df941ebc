// The layout of a tensor on a mesh as a value: its states, its dual, and the part that a rank holds. A spec
// (layout/spec.hpp) is the same as a type.
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

/// A dim and the axes that shard it, the first one major. Without axes the dim is whole.
struct dim_placement {
  dim_id dim;
  axis_list axes;
  friend constexpr bool operator==(const dim_placement&, const dim_placement&) = default;
};

using dim_list = static_vector<dim_id, max_dims>;

/// How a tensor lies on a mesh, as a value; all rules and plans compute with it. Dims are in memory order (row-major).
/// An axis in none of the four lists is invariant but unmentioned, and a layer's boundary refuses it.
struct layout {
  static_vector<dim_placement, max_dims> dims;
  axis_list replicated;  // these three are sorted by name, so equal layouts compare equal
  axis_list partial;
  axis_list invariant;

  constexpr int find(dim_id dim) const {
    for (std::size_t i = 0; i < dims.size(); ++i)
      if (dims[i].dim == dim) return static_cast<int>(i);
    return -1;
  }
  constexpr bool has(dim_id dim) const { return find(dim) >= 0; }
  /// The axes that shard `dim`; none if it is whole or absent.
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

  /// Gives `axis` a state other than varying; it then shards no dim.
  constexpr void set(axis_id axis, state s) {
    remove(axis);
    axis_list& target = s == state::replicated ? replicated : s == state::partial ? partial : invariant;
    std::size_t at = 0;
    while (at < target.size() && before(target[at], axis)) ++at;
    target.insert(at, axis);
  }
  /// Shards `dim` over `axis`, inside the axes that already shard it.
  constexpr void append(dim_id dim, axis_id axis) {
    remove(axis);
    dims[static_cast<std::size_t>(find(dim))].axes.push_back(axis);
  }

  friend constexpr bool operator==(const layout&, const layout&) = default;

 private:
  constexpr void remove(axis_id axis) {
    const auto remove_from = [&](axis_list& list) {
      if (const int i = list.find(axis); i >= 0) list.erase(static_cast<std::size_t>(i));
    };
    for (dim_placement& p : dims) remove_from(p.axes);
    for (axis_list* set : {&replicated, &partial, &invariant}) remove_from(*set);
  }
};

/// Whether two layouts are equal. A mentioned invariant axis equals an unmentioned one.
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

/// Where part `i` of `parts` of n elements begins. Sizes of parts differ by at most one. Splitting each of p parts into
/// q gives the same bounds as p q parts: part i of p consists of parts i q to i q + q - 1 of p q.
constexpr std::int64_t part_begin(std::int64_t n, std::int64_t parts, std::int64_t i) { return n * i / parts; }

/// Global sizes of dims: one table for a whole model.
struct dim_sizes {
  static_vector<dim_id, 24> dims;
  static_vector<std::int64_t, 24> sizes;
  static_vector<std::int64_t, 24> blocks;

  /// Sets the size of `dim`. Ranks hold whole blocks of `block` elements, such as query heads that share a kv head.
  /// `block` divides `size`.
  constexpr void set(dim_id dim, std::int64_t size, std::int64_t block = 1) {
    if (const int i = dims.find(dim); i >= 0) {
      sizes[static_cast<std::size_t>(i)] = size;
      blocks[static_cast<std::size_t>(i)] = block;
      return;
    }
    dims.push_back(dim);
    sizes.push_back(size);
    blocks.push_back(block);
  }
  /// Global size of `dim`, or -1 when the table lacks it.
  constexpr std::int64_t of(dim_id dim) const {
    const int i = dims.find(dim);
    return i < 0 ? -1 : sizes[static_cast<std::size_t>(i)];
  }
  /// Elements per block of `dim`; a block is never split between ranks.
  constexpr std::int64_t block_of(dim_id dim) const {
    const int i = dims.find(dim);
    return i < 0 ? 1 : blocks[static_cast<std::size_t>(i)];
  }
  /// Where part `i` of `parts` of `dim` begins.
  constexpr std::int64_t begin_of(dim_id dim, std::int64_t parts, std::int64_t i) const {
    const std::int64_t block = block_of(dim);
    return part_begin(of(dim) / block, parts, i) * block;
  }
};

/// The part of the tensor that `rank` holds. Every rank must have elements (`check_parts`).
constexpr box local_box(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes, std::int64_t rank) {
  box b;
  for (const dim_placement& p : a.dims) {
    const std::size_t d = static_cast<std::size_t>(b.dims++);
    const std::int64_t parts = mesh.size(p.axes), part = mesh.index_in(rank, p.axes);
    b.global[d] = sizes.of(p.dim);
    b.offset[d] = sizes.begin_of(p.dim, parts, part);
    b.local[d] = sizes.begin_of(p.dim, parts, part + 1) - b.offset[d];
  }
  return b;
}

/// Elements of the largest possible part. No rank holds more.
constexpr std::int64_t most_elements(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes) {
  std::int64_t n = 1;
  for (const dim_placement& p : a.dims) {
    const std::int64_t parts = mesh.size(p.axes), block = sizes.block_of(p.dim);
    n *= (sizes.of(p.dim) / block + parts - 1) / parts * block;
  }
  return n;
}

/// Whether all ranks that shard this dim hold equally many of its elements.
constexpr bool even(const dim_placement& p, const mesh_shape& mesh, const dim_sizes& sizes) {
  return sizes.of(p.dim) % (mesh.size(p.axes) * sizes.block_of(p.dim)) == 0;
}
/// Whether `even` holds for every dim.
constexpr bool even(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes) {
  for (const dim_placement& p : a.dims)
    if (!even(p, mesh, sizes)) return false;
  return true;
}

/// Returns the axes with more than one rank that shard some dim, in the mesh's order.
constexpr axis_list sharding_axes(const layout& a, const mesh_shape& mesh) {
  axis_list axes;
  for (axis_id axis : mesh.axes)
    if (mesh.extent(axis) > 1 && a.sharded_by(axis)) axes.push_back(axis);
  return axes;
}

}  // namespace plait
