#pragma once

#include "plait/core/collective.hpp"
#include "plait/layout/plan.hpp"

namespace plait {

/// Whether every dim has a size and divides by the ranks that shard it.
constexpr verdict check_divides(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes) {
  for (const dim_placement& p : a.dims)
    if (sizes.of(p.dim) % mesh.size(p.axes) != 0)
      return {rule::does_not_divide, p.axes.empty() ? axis_id{} : p.axes[0], p.dim, state::varying, state::varying};
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

/// The part of `a` that also lies in `b`, both parts of one tensor.
constexpr box intersect(const box& a, const box& b) {
  box c = a;
  for (std::size_t d = 0; d < static_cast<std::size_t>(a.dims); ++d) {
    const std::int64_t low = a.offset[d] > b.offset[d] ? a.offset[d] : b.offset[d];
    const std::int64_t end_a = a.offset[d] + a.local[d], end_b = b.offset[d] + b.local[d];
    c.offset[d] = low;
    c.local[d] = (end_a < end_b ? end_a : end_b) - low;
    if (c.local[d] < 0) c.local[d] = 0;
  }
  return c;
}

constexpr collective collective_of(move m) {
  switch (m) {
    case move::all_gather:
      return collective::all_gather;
    case move::reduce_scatter:
      return collective::reduce_scatter;
    case move::all_to_all:
      return collective::all_to_all;
    default:
      return collective::all_reduce;
  }
}

/// One collective of a plan as the ledger will count it: for one rank's group.
struct collective_cost {
  collective kind = collective::all_reduce;
  axis_list axes;
  std::uint64_t payload = 0;  ///< bytes that one rank hands in
  std::uint64_t wire = 0;     ///< bytes on the wire, summed over the group's ranks
};

/// Elements that leave their rank in an all-to-all between two layouts, summed over the group of `axes` that `rank` is
/// in.
constexpr std::uint64_t exchanged_elements(const layout& from, const layout& to, const axis_list& axes,
                                           const mesh_shape& mesh, const dim_sizes& sizes, std::int64_t rank = 0) {
  std::uint64_t moved = 0;
  const std::int64_t group = mesh.group_of(rank, axes);
  for (std::int64_t r = 0; r < mesh.size(); ++r)
    if (mesh.group_of(r, axes) == group) {
      const box held = local_box(from, mesh, sizes, r);
      moved +=
          static_cast<std::uint64_t>(held.local_size() - intersect(held, local_box(to, mesh, sizes, r)).local_size());
    }
  return moved;
}

/// Step `i` of a plan, for elements of `element_bytes`. Groups of one rank cost nothing.
constexpr collective_cost cost(const plan& p, std::size_t i, const mesh_shape& mesh, const dim_sizes& sizes,
                               std::uint64_t element_bytes) {
  const step& s = p.steps[i];
  if (!communicates(s.kind) || mesh.size(s.axes) == 1) return {collective_of(s.kind), s.axes, 0, 0};
  const auto payload = static_cast<std::uint64_t>(local_elements(p.before(i), mesh, sizes)) * element_bytes;
  const collective kind = collective_of(s.kind);
  if (kind == collective::all_to_all)
    return {kind, s.axes, payload, exchanged_elements(p.before(i), s.after, s.axes, mesh, sizes) * element_bytes};
  return {kind, s.axes, payload, wire_bytes(kind, static_cast<int>(mesh.size(s.axes)), payload)};
}

/// Wire bytes of a whole plan, summed over all ranks of the mesh.
constexpr std::uint64_t bytes(const plan& p, const mesh_shape& mesh, const dim_sizes& sizes,
                              std::uint64_t element_bytes) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < p.steps.size(); ++i) {
    const collective_cost c = cost(p, i, mesh, sizes, element_bytes);
    total += c.wire * static_cast<std::uint64_t>(mesh.size() / mesh.size(c.axes));
  }
  return total;
}

}  // namespace plait
