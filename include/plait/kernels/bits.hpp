// The bits of a number as another type, in kernels of processors and of GPUs: std::bit_cast is no function of a GPU's,
// and nvcc's remark about that is but a warning.
#pragma once

#include "plait/core/compiled.hpp"

namespace plait::kernels {

/// `To` and `From` have one size and are copied bit by bit.
template <class To, class From>
PLAIT_HOST_DEVICE constexpr To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, x);
}

}  // namespace plait::kernels
