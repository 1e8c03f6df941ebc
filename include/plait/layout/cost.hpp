// The bytes that a plan sends, computed from layouts and sizes. comm/metrics.hpp counts the bytes of a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "plait/core/collective.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/plan.hpp"

namespace plait {

/// The collective that a transition issues; none where nothing leaves a rank.
constexpr std::optional<collective> collective_of(transition_kind m) {
  switch (m) {
    case transition_kind::all_reduce:
      return collective::all_reduce;
    case transition_kind::all_gather:
      return collective::all_gather;
    case transition_kind::reduce_scatter:
      return collective::reduce_scatter;
    case transition_kind::all_to_all:
      return collective::all_to_all;
    default:
      return std::nullopt;
  }
}

/// One collective of a plan as the ledger will count it: for one rank's group.
struct collective_cost {
  collective kind = collective::barrier;
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
      const std::optional<box> stays = intersect(held, local_box(to, mesh, sizes, r));
      moved += static_cast<std::uint64_t>(held.local_size() - (stays ? stays->local_size() : 0));
    }
  return moved;
}

/// Returns the cost of step `i` of a plan, for elements of `element_bytes`. Groups of one rank cost nothing, and
/// neither do steps that issue no collective.
constexpr collective_cost cost(const plan& p, std::size_t i, const mesh_shape& mesh, const dim_sizes& sizes,
                               std::uint64_t element_bytes) {
  const redistribution_step& s = p.steps[i];
  const std::optional<collective> kind = collective_of(s.kind);
  if (!kind) return {};
  if (mesh.size(s.axes) == 1) return {*kind, s.axes, 0, 0};
  const auto payload = static_cast<std::uint64_t>(local_elements(p.before(i), mesh, sizes)) * element_bytes;
  if (*kind == collective::all_to_all)
    return {*kind, s.axes, payload, exchanged_elements(p.before(i), s.after, s.axes, mesh, sizes) * element_bytes};
  return {*kind, s.axes, payload, wire_bytes(*kind, static_cast<int>(mesh.size(s.axes)), payload)};
}

/// Wire bytes of a whole plan, summed over all ranks of the mesh.
constexpr std::uint64_t bytes(const plan& p, const mesh_shape& mesh, const dim_sizes& sizes,
                              std::uint64_t element_bytes) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < p.steps.size(); ++i) {
    if (!communicates(p.steps[i].kind)) continue;
    const collective_cost c = cost(p, i, mesh, sizes, element_bytes);
    total += c.wire * static_cast<std::uint64_t>(mesh.size() / mesh.size(c.axes));
  }
  return total;
}

}  // namespace plait
