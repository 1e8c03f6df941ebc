// The walk of a block of threads over one row that may begin anywhere, in 16-byte vectors where it can. It serves
// kernels/cuda/cross_entropy.hpp; rows whose vectors all begin alike are in kernels/cuda/rows.hpp.
#pragma once

#include <cstdint>

#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

/// Lets a block walk over `size` elements of a row that may begin anywhere: calls vectors(i, j) for the indices of two
/// whole 16-byte vectors, which can be on their way at once (j is -1 where there is one left), and single(i) for the
/// elements before and after them. `row` is any array that those functions read
/// or write as vectors; `whole` is false where they could not, because two arrays lie differently.
template <class T, class Vectors, class Single>
__device__ inline void walk_row(const T* row, std::int64_t size, bool whole, Vectors vectors, Single single) {
  constexpr int n = vector16<T>::size;
  std::int64_t head = size;
  if (whole) {
    const auto over = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) / sizeof(T) % n);
    head = over == 0 ? 0 : n - over;
    if (head > size) head = size;
  }
  const std::int64_t tail = head + (size - head) / n * n;
  for (std::int64_t k = threadIdx.x; k < head; k += blockDim.x) single(k);
  const std::int64_t step = blockDim.x * n;
  std::int64_t i = head + threadIdx.x * n;
  for (; i + step < tail; i += 2 * step) vectors(i, i + step);
  if (i < tail) vectors(i, -1);
  for (std::int64_t k = tail + threadIdx.x; k < size; k += blockDim.x) single(k);
}

/// Whether two rows have their vectors at the same indices.
template <class T>
__device__ inline bool lie_alike(const T* a, const T* b) {
  return reinterpret_cast<std::uintptr_t>(a) % 16 == reinterpret_cast<std::uintptr_t>(b) % 16;
}

}  // namespace plait::kernels::detail
