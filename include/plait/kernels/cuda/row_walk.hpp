#pragma once

#include <cstdint>

#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

/// Lets a block walk over `size` elements of a row that may begin anywhere: calls vector(i) for the indices of whole
/// 16-byte vectors and single(i) for the elements before and after them. `row` is any array that those functions read
/// or write as vectors; `vectors` is false where they could not, because two arrays lie differently.
template <class T, class Vector, class Single>
__device__ inline void walk_row(const T* row, std::int64_t size, bool vectors, Vector vector, Single single) {
  constexpr int n = vector16<T>::size;
  std::int64_t head = size;
  if (vectors) {
    const auto over = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) / sizeof(T) % n);
    head = over == 0 ? 0 : n - over;
    if (head > size) head = size;
  }
  const std::int64_t tail = head + (size - head) / n * n;
  for (std::int64_t i = threadIdx.x; i < head; i += blockDim.x) single(i);
  for (std::int64_t i = head + threadIdx.x * n; i < tail; i += blockDim.x * n) vector(i);
  for (std::int64_t i = tail + threadIdx.x; i < size; i += blockDim.x) single(i);
}

/// Whether two rows have their vectors at the same indices.
template <class T>
__device__ inline bool lie_alike(const T* a, const T* b) {
  return reinterpret_cast<std::uintptr_t>(a) % 16 == reinterpret_cast<std::uintptr_t>(b) % 16;
}

}  // namespace plait::kernels::detail
