// The description of a copy between strided arrays, such as the copy of a part between two boxes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plait/core/box.hpp"
#include "plait/core/text.hpp"

namespace plait::kernels {

/// A copy between two strided arrays: `size[d]` steps of `from_stride[d]` and `to_stride[d]` bytes along each
/// dimension. The last dimension counts bytes. Dimensions that are contiguous on both sides are merged.
struct strided_copy {
  static constexpr int most_dims = max_dims + 1;

  int dims = 0;  ///< at least 1, unless there is nothing to copy
  std::int64_t size[most_dims]{}, from_stride[most_dims]{}, to_stride[most_dims]{};  // kernels index them

  /// Returns the number of pieces of size[dims - 1] bytes: the product of all sizes but the last.
  constexpr std::int64_t pieces() const {
    std::int64_t n = dims == 0 ? 0 : 1;
    for (int d = 0; d + 1 < dims; ++d) n *= size[static_cast<std::size_t>(d)];
    return n;
  }
  constexpr std::int64_t piece_bytes() const { return dims == 0 ? 0 : size[static_cast<std::size_t>(dims - 1)]; }

  /// Adds the next inner dimension.
  constexpr void push(std::int64_t n, std::int64_t from, std::int64_t to) {
    if (n != 1) append(n, from, to);
  }
  /// Adds the innermost dimension: n bytes without gaps.
  constexpr void push_bytes(std::int64_t n) { append(n, 1, 1); }

 private:
  constexpr void append(std::int64_t n, std::int64_t from, std::int64_t to) {
    if (dims > 0) {
      const auto outer = static_cast<std::size_t>(dims - 1);
      if (from_stride[outer] == n * from && to_stride[outer] == n * to) {
        size[outer] *= n, from_stride[outer] = from, to_stride[outer] = to;
        return;
      }
    }
    const auto at = static_cast<std::size_t>(dims++);
    size[at] = n, from_stride[at] = from, to_stride[at] = to;
  }
};

/// Returns the offset of the element at `at` of a tensor in an array that holds the box `whole`, in elements.
constexpr std::int64_t offset_of(const box& whole, const per_dim& at) {
  std::int64_t place = 0;
  for (std::size_t d = 0; d < static_cast<std::size_t>(whole.dims); ++d)
    place = place * whole.local[d] + at[d] - whole.offset[d];
  return place;
}

/// Returns the copy of `part` from an array that holds the box `from` to an array that holds the box `to`.
constexpr strided_copy copy_of(const box& from, const box& to, const box& part, std::int64_t element_bytes) {
  strided_copy copy;
  if (part.local_size() == 0) return copy;
  per_dim from_stride{}, to_stride{};
  std::int64_t from_bytes = element_bytes, to_bytes = element_bytes;
  for (auto d = static_cast<std::size_t>(part.dims); d-- > 0;) {
    from_stride[d] = from_bytes, to_stride[d] = to_bytes;
    from_bytes *= from.local[d], to_bytes *= to.local[d];
  }
  for (std::size_t d = 0; d < static_cast<std::size_t>(part.dims); ++d)
    copy.push(part.local[d], from_stride[d], to_stride[d]);
  copy.push_bytes(element_bytes);
  return copy;
}

}  // namespace plait::kernels
