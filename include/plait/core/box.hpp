// One rank's part of a global tensor in numbers: sizes and offsets. A box knows neither axes nor dims:
// layout/local_box.hpp makes it from a layout and a mesh. Copies between boxes: kernels/strided_copy.hpp.
#pragma once

#include <array>
#include <cstdint>

#include "plait/version.hpp"

namespace plait {

/// The most logical dimensions that one tensor may have.
inline constexpr int max_dims = 6;

/// The part of a global row-major tensor that one rank holds: `local[d]` of `global[d]` elements, from `offset[d]`,
/// along each dimension, stored row-major without gaps. Kernels use it to key random numbers by the global element
/// index, which is what makes initial weights and dropout the same on every mesh.
struct box {
  int dims = 0;
  std::array<std::int64_t, max_dims> global{};
  std::array<std::int64_t, max_dims> offset{};
  std::array<std::int64_t, max_dims> local{};

  constexpr std::int64_t local_size() const {
    std::int64_t n = 1;
    for (int d = 0; d < dims; ++d) n *= local[d];
    return n;
  }
  constexpr std::int64_t global_size() const {
    std::int64_t n = 1;
    for (int d = 0; d < dims; ++d) n *= global[d];
    return n;
  }
};

}  // namespace plait
