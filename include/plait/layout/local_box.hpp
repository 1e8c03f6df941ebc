// Which part of a tensor a rank holds, from a layout, a mesh and sizes. Only `check_divides` looks whether sizes
// divide; the other functions take it for granted.
#pragma once

#include "plait/layout/plan.hpp"

namespace plait {

/// Checks that every dim divides by the ranks that shard it. A dim that is sharded and has no size does not.
constexpr verdict check_divides(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes) {
  for (const dim_placement& p : a.dims)
    if (sizes.of(p.dim) % mesh.size(p.axes) != 0)
      return {layout_error::does_not_divide, p.axes.empty() ? axis_id{} : p.axes[0], p.dim, state::varying,
              state::varying};
  return {};
}

/// The part of the tensor that `rank` holds.
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
