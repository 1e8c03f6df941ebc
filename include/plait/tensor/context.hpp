// The context of layers: one rank's device and world, the sizes of dims, the seed, and the order of sums. Specs are
// checked against its mesh and sizes at run time; `boundary` (layout/check.hpp) checks a static mesh.
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

/// The context in which layers run: one rank's device and mesh, the global size of every dim, the seed of random
/// numbers, and the order of sums. It does not change during a step; `microbatch` (tensor/microbatch.hpp) has the state
/// that does.
template <compute_device Device>
struct context {
  Device& device;
  world& ranks;
  dim_sizes sizes;
  std::uint64_t seed = 0;
  /// The order of sums over sharded dims (core/types.hpp).
  deterministic_leaves deterministic{};
};

/// Reduces one number of each rank of the mesh on the host, like `all_reduce_scalar` over ranks. `comm/metrics.hpp`
/// does not count it.
template <compute_device Device>
double all_reduce_scalar(const context<Device>& ctx, double value, reduce_op op) {
  return all_reduce_scalar(ctx.device, ctx.ranks.root(), value, op);
}

/// Whether sums are deterministic: they have one order for every layout.
template <compute_device Device>
bool sums_in_order(const context<Device>& ctx) {
  return static_cast<bool>(ctx.deterministic);
}

/// Throws if sums are deterministic, because the sums of `what` depend on the layout.
template <compute_device Device>
void require_any_order(const context<Device>& ctx, std::string_view name, std::string_view what) {
  if (sums_in_order(ctx)) fail({name, ": deterministic sums have no order for ", what});
}

/// Throws unless `Spec` mentions every axis of the context's mesh and no other; the text equals the compile error's.
/// `where` names the layer and the boundary. Constructors of layers call it.
template <spec_like Spec, compute_device Device>
void enforce_boundary(const context<Device>& ctx, const std::string& where) {
  enforce(check_boundary(layout_v<Spec>, ctx.ranks.shape()), where);
}

/// Returns the part of a tensor with this spec that the context's rank holds. Throws like the overload for a
/// `rank_place`.
template <spec_like Spec, compute_device Device>
box part_of(const context<Device>& ctx) {
  return part_of<Spec>(ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
