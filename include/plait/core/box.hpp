// One rank's part of a global tensor in numbers: sizes and offsets. A box knows neither axes nor dims:
// layout/layout.hpp makes it from a layout and a mesh. Copies between boxes: kernels/strided_copy.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <optional>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/version.hpp"

namespace plait {

/// The most logical dimensions that one tensor may have.
inline constexpr int max_dims = 6;

/// A number for each dimension of a tensor. Signed and unsigned counters index it alike: loops over dimensions count
/// with `int`, as `box::dims` does.
struct per_dim : std::array<std::int64_t, max_dims> {
  template <std::integral I>
  constexpr std::int64_t& operator[](I d) {
    return data()[d];
  }
  template <std::integral I>
  constexpr const std::int64_t& operator[](I d) const {
    return data()[d];
  }
};

/// The part of a global row-major tensor that one rank holds: `local[d]` of `global[d]` elements, from `offset[d]`,
/// along each dimension, stored row-major without gaps. Kernels use it to key random numbers by the global element
/// index, so initial weights and dropout are equal on every mesh.
struct box {
  int dims = 0;
  per_dim global{};
  per_dim offset{};
  per_dim local{};
  /// How many of the last rows of dim 0 are padding: a program's whole array lacks them.
  std::int64_t padding = 0;

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

/// Returns the box of the same part in the whole array without padding. A part that is padding alone has no rows then.
constexpr box without_padding(box part) {
  if (part.padding == 0) return part;
  part.global[0] -= part.padding;
  part.local[0] = std::clamp<std::int64_t>(part.global[0] - part.offset[0], 0, part.local[0]);
  part.padding = 0;
  return part;
}

/// Whether two boxes are of tensors of one shape.
constexpr bool same_tensor(const box& a, const box& b) {
  bool same = a.dims == b.dims;
  for (int d = 0; same && d < a.dims; ++d) same = a.global[d] == b.global[d];
  return same;
}

/// Returns what `a` and `b`, boxes of one tensor, have in common, or nothing. Throws `error` if the tensors differ in
/// shape.
constexpr std::optional<box> intersect(const box& a, const box& b) {
  if (!same_tensor(a, b)) fail("boxes of tensors of different shape have no intersection");
  box common = a;
  for (int d = 0; d < a.dims; ++d) {
    common.offset[d] = std::max(a.offset[d], b.offset[d]);
    common.local[d] = std::min(a.offset[d] + a.local[d], b.offset[d] + b.local[d]) - common.offset[d];
    if (common.local[d] <= 0) return std::nullopt;
  }
  return common;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
