// The context of layers: one rank's device and world, the sizes of dims, and the seed.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "plait/comm/world.hpp"
#include "plait/core/containers.hpp"
#include "plait/core/deterministic.hpp"
#include "plait/device/device.hpp"
#include "plait/layout/layout.hpp"

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

/// Where a function or a value of the program's hides one of the first four dims, this says so.
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
/// Where a name is no dim, or the sizes are not as many as the dims, this says so.
template <class... Dims, class... Sizes>
  requires(!(dim_like<Dims> && ...) || sizeof...(Dims) != sizeof...(Sizes))
constexpr dim_sizes sizes_of(Sizes...) {
  static_assert((dim_like<Dims> && ...), "sizes_of takes dims: structs that derive from plait::dim_tag");
  static_assert(!(dim_like<Dims> && ...) || sizeof...(Dims) == sizeof...(Sizes),
                "sizes_of takes one size for each dim, in the order of the dims");
  return {};
}

/// Layers run in a context: one rank's device and mesh, the global size of every dim, the seed of random numbers, and
/// how sums are made.
/// Nothing in it changes during a step; what differs between microbatches is in `microbatch` (tensor/microbatch.hpp).
template <compute_device Device>
struct context {
  Device& device;
  world& ranks;
  dim_sizes sizes;
  std::uint64_t seed = 0;
  /// How sums are made that the layout cuts (core/deterministic.hpp).
  deterministic_leaves deterministic{};
};

}  // namespace plait
