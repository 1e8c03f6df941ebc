// Strided copies on a GPU; their meaning is in kernels/cpu/copy.hpp. Each is one launch, or a copy by the device itself
// where nothing is strided.
#pragma once

#include <cstdint>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/strided_copy.hpp"

namespace plait::kernels {

/// Copies `planes` planes of `rows` rows of `row_bytes` bytes, with a byte stride for planes and one for rows on either
/// side. Source and destination must not overlap.
void copy_3d(cuda& device, const void* from, void* to, std::int64_t planes, std::int64_t rows, std::int64_t row_bytes,
             std::int64_t from_plane_stride, std::int64_t from_row_stride, std::int64_t to_plane_stride,
             std::int64_t to_row_stride);

/// Copies `rows` rows of `row_bytes` bytes; strides are the bytes between the starts of consecutive rows. Source and
/// destination must not overlap.
void copy_2d(cuda& device, const void* from, void* to, std::int64_t rows, std::int64_t row_bytes,
             std::int64_t from_stride, std::int64_t to_stride);

/// Copies `part` from an array that holds the box `from` to one that holds the box `to`, elements of `element_bytes`.
/// Both arrays are row-major without gaps, and `part` lies in both boxes.
void copy_box(cuda& device, const void* in, const box& from, void* out, const box& to, const box& part,
              std::int64_t element_bytes);

}  // namespace plait::kernels

#if defined(PLAIT_CUDA_KERNELS) && !defined(PLAIT_COMPILED_CUDA)  // there is no template among them
#include "plait/kernels/cuda/copy.ipp"
#endif
