// The context of layers: one rank's device and world, the sizes of dims, the seed and how sums are made. Specs are
// checked against its mesh and sizes; for a mesh that the compiler knows, layout/check.hpp has `boundary`.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "plait/comm/host_values.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/device/device.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"

namespace plait {

/// Layers run in a context: one rank's device and mesh, the global size of every dim, the seed of random numbers, and
/// how sums are made. Nothing in it changes during a step; `microbatch` (tensor/microbatch.hpp) has what does.
template <compute_device Device>
struct context {
  Device& device;
  world& ranks;
  dim_sizes sizes;
  std::uint64_t seed = 0;
  /// How sums are made that the layout cuts (core/types.hpp).
  deterministic_leaves deterministic{};
};

/// Reduces one number of each rank of the mesh on the host, as `all_reduce_scalar` over ranks; not counted in the
/// ledger.
template <compute_device Device>
double all_reduce_scalar(const context<Device>& ctx, double value, reduce_op op) {
  return all_reduce_scalar(ctx.device, ctx.ranks.root(), value, op);
}

/// Whether sums have one order, whatever the layout.
template <compute_device Device>
bool sums_in_order(const context<Device>& ctx) {
  return static_cast<bool>(ctx.deterministic);
}

/// Throws with deterministic sums, which have no order for `what`: its sums depend on the layout.
template <compute_device Device>
void require_any_order(const context<Device>& ctx, std::string_view name, std::string_view what) {
  if (sums_in_order(ctx)) fail({name, ": deterministic sums have no order for ", what});
}

/// Throws, with the text that the compiler has for a mesh it knows, unless `Spec` mentions every axis of the context's
/// mesh and no other. `where` names the layer and which of its boundaries this is. Layers call it when they are made.
template <spec_like Spec, compute_device Device>
void enforce_boundary(const context<Device>& ctx, const std::string& where) {
  enforce(check_boundary(layout_v<Spec>, ctx.ranks.shape()), where);
}

/// Returns the part of a tensor with this spec that the context's rank holds. Throws as for a `rank_place`.
template <spec_like Spec, compute_device Device>
box part_of(const context<Device>& ctx) {
  return part_of<Spec>(ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
