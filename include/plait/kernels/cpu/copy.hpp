// Copies of strided blocks on the CPU, which pack a dim for a collective and unpack it again. Whole arrays are copied
// by the device itself (device/cpu.hpp).
#pragma once

#include <cstdint>
#include <cstring>

#include "plait/core/box.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/strided_copy.hpp"

namespace plait::kernels {

/// Copies `rows` rows of `row_bytes` bytes; strides are the bytes between the starts of consecutive rows. Source and
/// destination must not overlap.
inline void copy_2d(cpu&, const void* from, void* to, std::int64_t rows, std::int64_t row_bytes,
                    std::int64_t from_stride, std::int64_t to_stride) {
  if (rows <= 0 || row_bytes <= 0) return;
  const auto* source = static_cast<const unsigned char*>(from);
  auto* target = static_cast<unsigned char*>(to);
  if (from_stride == row_bytes && to_stride == row_bytes) {
    std::memcpy(target, source, static_cast<std::size_t>(rows * row_bytes));
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(target + r * to_stride, source + r * from_stride, static_cast<std::size_t>(row_bytes));
  }
}

/// Copies `planes` planes of `rows` rows of `row_bytes` bytes, with a byte stride for planes and one for rows on either
/// side: what packs a middle dimension for a collective and unpacks it again.
inline void copy_3d(cpu& device, const void* from, void* to, std::int64_t planes, std::int64_t rows,
                    std::int64_t row_bytes, std::int64_t from_plane_stride, std::int64_t from_row_stride,
                    std::int64_t to_plane_stride, std::int64_t to_row_stride) {
  for (std::int64_t p = 0; p < planes; ++p) {
    copy_2d(device, static_cast<const unsigned char*>(from) + p * from_plane_stride,
            static_cast<unsigned char*>(to) + p * to_plane_stride, rows, row_bytes, from_row_stride, to_row_stride);
  }
}

/// Copies `part` from an array that holds the box `from` to one that holds the box `to`, elements of `element_bytes`.
/// Both arrays are row-major without gaps, and `part` lies in both boxes.
inline void copy_box(cpu&, const void* in, const box& from, void* out, const box& to, const box& part,
                     std::int64_t element_bytes) {
  const strided_copy copy = copy_of(from, to, part, element_bytes);
  const auto* const source = static_cast<const unsigned char*>(in) + offset_of(from, part) * element_bytes;
  auto* const target = static_cast<unsigned char*>(out) + offset_of(to, part) * element_bytes;
  const std::int64_t pieces = copy.pieces();
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    std::int64_t rest = piece, from_at = 0, to_at = 0;
    for (auto d = static_cast<std::size_t>(copy.dims - 1); d-- > 0;) {
      const std::int64_t index = rest % copy.size[d];
      rest /= copy.size[d];
      from_at += index * copy.from_stride[d];
      to_at += index * copy.to_stride[d];
    }
    std::memcpy(target + to_at, source + from_at, static_cast<std::size_t>(copy.piece_bytes()));
  }
}

}  // namespace plait::kernels
