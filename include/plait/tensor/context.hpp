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
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"

namespace plait {

/// The table of global sizes that a context holds: `sizes_of<batch, seq, hidden>(8, 1024, 512)`.
template <dim_like... Dims, class... Sizes>
  requires(sizeof...(Dims) == sizeof...(Sizes) && (std::is_convertible_v<Sizes, std::int64_t> && ...))
constexpr dim_sizes sizes_of(Sizes... sizes) {
  dim_sizes table;
  (table.set(dim_of<Dims>, static_cast<std::int64_t>(sizes)), ...);
  return table;
}

namespace detail {
/// Refuses what `sizes_of` is given in the place of a dim.
template <auto Given>
constexpr dim_sizes refuse_size_of() {
  static_assert(
      always_false<decltype(Given)>,
      "sizes_of takes dims, and one of these names is a function or a value of the program's, which hides the "
      "dim: write plait::batch, or give the function another name");
  return {};
}
}  // namespace detail

/// Chosen where a function or a value of the program hides one of the first four dims; refuses to compile.
template <auto Given, class... Rest>
constexpr dim_sizes sizes_of(...) {
  return detail::refuse_size_of<Given>();
}
template <class, auto Given, class... Rest>
constexpr dim_sizes sizes_of(...) {
  return detail::refuse_size_of<Given>();
}
template <class, class, auto Given, class... Rest>
constexpr dim_sizes sizes_of(...) {
  return detail::refuse_size_of<Given>();
}
template <class, class, class, auto Given, class... Rest>
constexpr dim_sizes sizes_of(...) {
  return detail::refuse_size_of<Given>();
}
/// Chosen where a name is no dim, or the sizes are not as many as the dims; refuses to compile.
template <class... Dims, class... Sizes>
  requires(!(dim_like<Dims> && ...) || sizeof...(Dims) != sizeof...(Sizes))
constexpr dim_sizes sizes_of(Sizes...) {
  static_assert((dim_like<Dims> && ...), "sizes_of takes dims: structs that derive from plait::dim_tag");
  static_assert(!(dim_like<Dims> && ...) || sizeof...(Dims) == sizeof...(Sizes),
                "sizes_of takes one size for each dim, in the order of the dims");
  return {};
}

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

/// Throws with deterministic sums, which have no order for `what`: its sums depend on the layout.
template <compute_device Device>
void require_any_order(const context<Device>& ctx, std::string_view name, std::string_view what) {
  if (ctx.deterministic) fail({name, ": deterministic sums have no order for ", what});
}

/// Throws, with the text that the compiler has for a mesh it knows, unless `Spec` mentions every axis of the context's
/// mesh and no other. `where` names the layer and which of its boundaries this is. Layers call it when they are made.
template <spec_like Spec, compute_device Device>
void enforce_boundary(const context<Device>& ctx, const std::string& where) {
  enforce(check_boundary(layout_v<Spec>, ctx.ranks.shape()), where);
}

/// Throws unless every dim divides by the ranks that shard it; the text names the dim, its size, the axes and their
/// extents.
inline void enforce_divides(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes, std::string_view where) {
  for (const dim_placement& p : a.dims) {
    const std::int64_t size = sizes.of(p.dim), ranks = mesh.size(p.axes);
    if (size < 0) fail({where, ": the context gives no size for the dim ", p.dim.text()});
    if (size % ranks == 0) continue;
    std::string extents;
    for (axis_id axis : p.axes) append(extents, {extents.empty() ? "" : " x ", axis.text(), "=", mesh.extent(axis)});
    fail({where, ": ", text_of(layout_error::does_not_divide), ": ", p.dim.text(), " is ", size, ", sharded over ",
          extents, " = ", ranks, " ranks; the nearest sizes that divide are ", size / ranks * ranks, " and ",
          (size / ranks + 1) * ranks});
  }
}

/// Returns the part of a tensor with this spec that the context's rank holds. Throws if the spec mentions an axis that
/// the mesh does not have. Throws also if a dim has no size, or a size that its axes do not divide. A tensor may leave
/// axes unmentioned: only a boundary, where gradients change hands, must not. Tensors are made in every step, so this
/// is a few compares of addresses.
template <spec_like Spec, compute_device Device>
box part_of(const context<Device>& ctx) {
  static constexpr axis_list mentioned = layout_v<Spec>.mentioned();
  const mesh_shape& mesh = ctx.ranks.shape();
  for (axis_id axis : mentioned)
    if (!mesh.has(axis)) enforce(check_boundary(layout_v<Spec>, mesh), "tensor " + describe(layout_v<Spec>));
  const box part = local_box(layout_v<Spec>, mesh, ctx.sizes, ctx.ranks.rank());
  for (std::size_t d = 0; d < static_cast<std::size_t>(part.dims); ++d) {
    const dim_placement& placed = layout_v<Spec>.dims[d];
    if (part.global[d] < 0 || part.local[d] * mesh.size(placed.axes) != part.global[d])
      enforce_divides(layout_v<Spec>, mesh, ctx.sizes, "tensor " + describe(layout_v<Spec>));
  }
  return part;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
