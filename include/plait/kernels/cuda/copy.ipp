// The kernels and launches of kernels/cuda/copy.hpp, which includes this where CUDA is compiled.
#pragma once

#include <cstddef>

#include "plait/kernels/cuda/chunk.hpp"

namespace plait::kernels {

namespace detail {

template <int Bytes>
struct alignas(Bytes) copy_unit {
  row_of<unsigned char, Bytes> at;
};

/// Pieces of `units` units each, at the places that the outer dimensions of `copy` give.
template <class Unit, class Index>
static __global__ void copy_kernel(const unsigned char* from, unsigned char* to, strided_copy copy, Index pieces,
                                   std::int64_t units) {
  const int outer = copy.dims - 1;
  const auto step = static_cast<std::int64_t>(gridDim.x) * blockDim.y;
  for (std::int64_t p = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
       p < static_cast<std::int64_t>(pieces); p += step) {
    auto rest = static_cast<Index>(p);
    std::int64_t source = 0, target = 0;
    PLAIT_UNROLL
    for (int d = strided_copy::most_dims - 2; d >= 0; --d) {
      if (d >= outer) continue;
      const auto size = static_cast<Index>(copy.size[d]);
      const Index quotient = rest / size, index = rest - quotient * size;
      rest = quotient;
      source += static_cast<std::int64_t>(index) * copy.from_stride[d];
      target += static_cast<std::int64_t>(index) * copy.to_stride[d];
    }
    const auto* const read = reinterpret_cast<const Unit*>(from + source);
    auto* const write = reinterpret_cast<Unit*>(to + target);
    PLAIT_UNROLL_BY(4)
    for (std::int64_t i = static_cast<std::int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; i < units;
         i += static_cast<std::int64_t>(gridDim.y) * blockDim.x)
      write[i] = read[i];
  }
}

template <int Bytes>
void launch_copy(cuda& device, const unsigned char* from, unsigned char* to, const strided_copy& copy) {
  constexpr std::int64_t threads = 256;
  const std::int64_t pieces = copy.pieces(), units = copy.piece_bytes() / Bytes;
  std::int64_t wide = 1;
  while (wide < units && wide < threads) wide *= 2;
  const dim3 block(static_cast<unsigned>(wide), static_cast<unsigned>(threads / wide));
  // Few long pieces are divided among blocks as well.
  const dim3 grid(plait::detail::blocks_for(pieces, block.y), plait::detail::blocks_for(units, 4 * wide, 65535));
  if (pieces <= 0x7fffffff) {
    plait::detail::launch(device, {grid, block}, copy_kernel<copy_unit<Bytes>, std::uint32_t>, from, to, copy,
                          static_cast<std::uint32_t>(pieces), units);
  } else {
    plait::detail::launch(device, {grid, block}, copy_kernel<copy_unit<Bytes>, std::int64_t>, from, to, copy, pieces,
                          units);
  }
}

inline void copy_strided(cuda& device, const void* from, void* to, const strided_copy& copy) {
  if (copy.pieces() <= 0 || copy.piece_bytes() <= 0) return;
  if (copy.dims == 1) {
    device.copy(to, from, static_cast<std::size_t>(copy.piece_bytes()), device.main_stream());
    return;
  }
  auto bits = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to) |
              static_cast<std::uintptr_t>(copy.piece_bytes());
  for (int d = 0; d + 1 < copy.dims; ++d) {
    const auto at = static_cast<std::size_t>(d);
    bits |= static_cast<std::uintptr_t>(copy.from_stride[at]) | static_cast<std::uintptr_t>(copy.to_stride[at]);
  }
  const auto* const source = static_cast<const unsigned char*>(from);
  auto* const target = static_cast<unsigned char*>(to);
  if (bits % 16 == 0) {
    launch_copy<16>(device, source, target, copy);
  } else if (bits % 8 == 0) {
    launch_copy<8>(device, source, target, copy);
  } else if (bits % 4 == 0) {
    launch_copy<4>(device, source, target, copy);
  } else if (bits % 2 == 0) {
    launch_copy<2>(device, source, target, copy);
  } else {
    launch_copy<1>(device, source, target, copy);
  }
}

}  // namespace detail

PLAIT_CUDA_INLINE void copy_3d(cuda& device, const void* from, void* to, std::int64_t planes, std::int64_t rows,
                               std::int64_t row_bytes, std::int64_t from_plane_stride, std::int64_t from_row_stride,
                               std::int64_t to_plane_stride, std::int64_t to_row_stride) {
  if (planes <= 0 || rows <= 0 || row_bytes <= 0) return;
  strided_copy copy;
  copy.push(planes, from_plane_stride, to_plane_stride);
  copy.push(rows, from_row_stride, to_row_stride);
  copy.push_bytes(row_bytes);
  detail::copy_strided(device, from, to, copy);
}

PLAIT_CUDA_INLINE void copy_2d(cuda& device, const void* from, void* to, std::int64_t rows, std::int64_t row_bytes,
                               std::int64_t from_stride, std::int64_t to_stride) {
  copy_3d(device, from, to, 1, rows, row_bytes, 0, from_stride, 0, to_stride);
}

PLAIT_CUDA_INLINE void copy_box(cuda& device, const void* in, const box& from, void* out, const box& to,
                                const box& part, std::int64_t element_bytes) {
  const strided_copy copy = copy_of(from, to, part, element_bytes);
  if (copy.dims == 0) return;
  detail::copy_strided(device, static_cast<const unsigned char*>(in) + offset_of(from, part) * element_bytes,
                       static_cast<unsigned char*>(out) + offset_of(to, part) * element_bytes, copy);
}

}  // namespace plait::kernels
