// Structs that the reductions of all devices share: arrays of a sum over many tensors, and the numbers of clipping.
// The kernels are in kernels/cpu/reductions.hpp and kernels/cuda/reductions.hpp.
#pragma once

#include <cstdint>

#include "plait/version.hpp"

namespace plait::kernels {

/// `size` elements in a device's memory that a kernel reads: one of the many tensors of one launch.
template <class G>
struct const_elements {
  const G* data = nullptr;
  std::int64_t size = 0;
};

/// The numbers that `clip` computes over the gradients of a step, in a device's memory.
struct clip_numbers {
  double norm = 0;
  double factor = 0;  ///< that gradients are multiplied with
  double update = 0;  ///< 1, or 0 where the norm is not finite
};

}  // namespace plait::kernels
