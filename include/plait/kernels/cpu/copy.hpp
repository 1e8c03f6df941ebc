#pragma once

#include <cstdint>
#include <cstring>

#include "plait/device/cpu.hpp"

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

}  // namespace plait::kernels
