// Structs that the reductions of all devices share: arrays of a sum over many tensors, and the numbers of clipping.
// The kernels are in kernels/cpu/reductions.hpp and kernels/cuda/reductions.hpp.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"

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
  double skips = 0;   ///< how often it was not, since this was zero
};

/// Returns what gradients of a finite norm are multiplied with where they are clipped to `limit`, as by PyTorch's
/// clip_grad_norm_: limit / (norm + 1e-6) where that is below 1. A limit of 0 does not clip.
PLAIT_HOST_DEVICE inline double clip_factor(double norm, double limit) {
  const double ratio = limit / (norm + 1e-6);
  return limit > 0 && ratio < 1 ? ratio : 1.0;
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
