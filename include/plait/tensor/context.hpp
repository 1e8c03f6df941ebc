// The context of layers: one rank's device and world, the sizes of dims, and the seed.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "plait/comm/world.hpp"
#include "plait/core/numerics.hpp"
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

/// Layers run in a context: one rank's device and mesh, the global size of every dim, the seed of random numbers, and
/// the numerics.
/// Nothing in it changes during a step; what differs between microbatches is in `microbatch` (tensor/microbatch.hpp).
template <compute_device Device>
struct context {
  Device& device;
  world& ranks;
  dim_sizes sizes;
  std::uint64_t seed = 0;
  /// How sums are made that the layout cuts (core/numerics.hpp).
  plait::numerics numerics{};
};

}  // namespace plait
