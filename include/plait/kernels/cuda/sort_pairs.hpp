// A stable sort of pairs of numbers on a GPU, by CUB. It declares the sort alone: its definition is in
// compiled_cuda_sort.cu, because what includes CUB compiles for longer, and has a namespace ::cuda beside plait::cuda.
#pragma once

#include <cstdint>

#include "plait/device/cuda.hpp"

namespace plait::kernels::detail {

/// Keys with a value each, in one of two arrays of `count`, between which a sort moves them.
struct key_values {
  std::uint32_t* keys[2];
  int* values[2];
  int now = 0;  ///< the arrays that hold them
};

/// Sorts by the lowest `bits` of the keys on the main stream; values of equal keys keep their order. Moves `now`.
void sort_pairs(cuda& device, key_values& pairs, int count, int bits);

}  // namespace plait::kernels::detail
