// A box: one rank's part of a global tensor, as sizes and offsets. layout/layout.hpp computes it from a layout and a
// mesh; kernels/strided_copy.hpp copies between boxes.
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

/// One number for each dimension of a tensor. The index may be signed or unsigned, because loops over dimensions count
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

/// The part of a global row-major tensor that one rank holds. Along dimension d it has `local[d]` of `global[d]`
/// elements, from `offset[d]` on, and is stored row-major without gaps. Kernels key random numbers by the global
/// element index that a box gives, so initial weights and dropout are equal on every mesh.
struct box {
  int dims = 0;
  per_dim global{};
  per_dim offset{};
  per_dim local{};
  /// Number of padding rows at the end of dim 0. A program's whole array does not have these rows.
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

/// Returns the box of the same part in the whole array without padding. A part that consists of padding has no rows.
constexpr box without_padding(box part) {
  if (part.padding == 0) return part;
  part.global[0] -= part.padding;
  part.local[0] = std::clamp<std::int64_t>(part.global[0] - part.offset[0], 0, part.local[0]);
  part.padding = 0;
  return part;
}

/// Whether two boxes belong to tensors of one shape.
constexpr bool same_tensor(const box& a, const box& b) {
  bool same = a.dims == b.dims;
  for (int d = 0; same && d < a.dims; ++d) same = a.global[d] == b.global[d];
  return same;
}

/// Returns the intersection of `a` and `b`, boxes of one tensor, or nothing if it is empty. Throws `error` if the
/// tensors differ in shape.
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
