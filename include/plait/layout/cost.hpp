// The bytes that a plan sends, computed from layouts and sizes. comm/metrics.hpp counts the bytes of a run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "plait/core/collective.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/plan.hpp"

namespace plait {

/// The collective that a transition issues, or none if it needs no communication.
constexpr std::optional<collective> collective_of(transition_kind m) {
  if (!communicates(m)) return std::nullopt;
  return static_cast<collective>(static_cast<int>(m) - static_cast<int>(transition_kind::all_reduce));
}
static_assert(collective_of(transition_kind::all_reduce) == collective::all_reduce &&
              collective_of(transition_kind::all_to_all) == collective::all_to_all);

/// The cost of one collective of a plan for one rank's group, as `comm/metrics.hpp` counts it at run time.
struct collective_cost {
  collective kind = collective::barrier;
  axis_list axes;
  std::uint64_t payload = 0;  ///< bytes of this rank's input
  std::uint64_t wire = 0;     ///< bytes on the wire, summed over the group's ranks
};

/// Elements that ranks send to other ranks in an all-to-all between two layouts. They are summed over the group along
/// `axes` that contains `rank`.
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

/// Returns the cost of step `i` of a plan in the group of `rank`, for elements of `element_bytes`. The cost is zero for
/// groups of one rank and for steps without a collective. Parts of unequal sizes count without padding; a dry run
/// (`world::counting`) counts the traffic of communicators that pad.
constexpr collective_cost cost(const plan& p, std::size_t i, const mesh_shape& mesh, const dim_sizes& sizes,
                               std::uint64_t element_bytes, std::int64_t rank = 0) {
  const redistribution_step& s = p.steps[i];
  const std::optional<collective> kind = collective_of(s.kind);
  if (!kind) return {};
  const std::int64_t ranks = mesh.size(s.axes);
  if (ranks == 1) return {*kind, s.axes, 0, 0};
  const auto sent = [&](const layout& a) {
    return static_cast<std::uint64_t>(local_box(a, mesh, sizes, rank).local_size()) * element_bytes;
  };
  const std::uint64_t payload = sent(p.before(i));
  if (*kind == collective::all_to_all)
    return {*kind, s.axes, payload,
            exchanged_elements(p.before(i), s.after, s.axes, mesh, sizes, rank) * element_bytes};
  if (*kind == collective::all_gather)  // each part goes to the other ranks
    return {*kind, s.axes, payload, static_cast<std::uint64_t>(ranks - 1) * sent(s.after)};
  return {*kind, s.axes, payload, wire_bytes(*kind, static_cast<int>(ranks), payload)};
}

/// Wire bytes of a whole plan, summed over all ranks of the mesh.
constexpr std::uint64_t bytes(const plan& p, const mesh_shape& mesh, const dim_sizes& sizes,
                              std::uint64_t element_bytes) {
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < p.steps.size(); ++i) {
    if (!communicates(p.steps[i].kind)) continue;
    if (even(p.before(i), mesh, sizes) && even(p.steps[i].after, mesh, sizes)) {  // all groups send equal amounts
      const collective_cost c = cost(p, i, mesh, sizes, element_bytes);
      total += c.wire * static_cast<std::uint64_t>(mesh.size() / mesh.size(c.axes));
      continue;
    }
    for (std::int64_t r = 0; r < mesh.size(); ++r)
      if (mesh.index_in(r, p.steps[i].axes) == 0) total += cost(p, i, mesh, sizes, element_bytes, r).wire;
  }
  return total;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
