// Boxes of one tensor as a checkpoint meets them: flat ranges as boxes, intersections, and an index that finds which
// boxes another one overlaps. Nothing is copied here: kernels/strided_copy.hpp. Next: checkpoint/manifest.hpp.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/static_vector.hpp"

namespace plait {

/// The most boxes that a flat range takes.
inline constexpr std::size_t max_flat_boxes = 2 * max_dims - 1;
using flat_boxes = static_vector<box, max_flat_boxes>;

/// Returns the elements [begin, end) of `whole`, counted row-major in its local part, as boxes of the same tensor: at
/// most 2n-1 for n dimensions, none for an empty range. In this order they follow each other in the range without gaps,
/// each contiguous in it and row-major in itself. Throws `error` unless 0 <= begin <= end <= whole.local_size().
constexpr flat_boxes boxes_of_flat_range(const box& whole, std::int64_t begin, std::int64_t end);

/// Returns what `a` and `b`, boxes of one tensor, have in common, or nothing. Throws `error` if the tensors differ in
/// shape.
constexpr std::optional<box> intersection(const box& a, const box& b);

/// Finds which of many boxes of one tensor overlap another: O(n log n) to build; a query costs about as much as it
/// finds, for boxes that tile the tensor.
class box_index {
 public:
  box_index() = default;
  /// Throws `error` if the boxes are not of one tensor.
  explicit box_index(std::span<const box> boxes);

  /// Returns the indices, ascending, of the boxes that have an element in common with `wanted`.
  std::vector<std::uint32_t> overlapping(const box& wanted) const;
};

}  // namespace plait
