// The logistic function inside CUDA kernels.
#pragma once

#include <cmath>
#include <type_traits>

#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

/// 1 / (1 + e^-x) for elements of type T, in the arithmetic of T. For bf16 the exponential is the hardware's: its error
/// of 2 + |1.2 x| units of the 24th bit (CUDA programming guide) reaches a bf16's 8 bits nowhere that e^-x matters.
template <class T>
__device__ inline arithmetic<T> logistic(arithmetic<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return 1.0f / (1.0f + __expf(-x));
  } else if constexpr (std::is_same_v<T, float>) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return 1.0 / (1.0 + exp(-x));
  }
}

}  // namespace plait::kernels::detail
