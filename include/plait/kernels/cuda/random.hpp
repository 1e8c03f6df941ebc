// Random numbers and dropout on a GPU for the part of a tensor that a `box` describes. Every number is keyed by (seed,
// stream, global row-major index of the element), with the words that kernels/cpu/random.hpp takes, so a tensor is the
// same however it is split. A normal number may differ from the CPU's in its last place.
#pragma once

#include <cstdint>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/philox.hpp"

namespace plait::kernels {

/// x = mean + std * normal. Computed in double, rounded to T.
template <class T>
void fill_normal(cuda& device, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double mean,
                 double std);

/// x uniform between low and high.
template <class T>
void fill_uniform(cuda& device, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double low,
                  double high);

/// y = x / (1 - p) where an element is kept, x times 0 with probability p. y may be x. Throws `plait::error` unless 0
/// <= p < 1.
template <class T>
void dropout_forward(cuda& device, const T* x, T* y, const box& part, std::uint64_t seed, std::uint64_t stream,
                     double p);

/// dx from dy with the same mask, made anew from the same (seed, stream). dx may be dy.
template <class T>
void dropout_backward(cuda& device, const T* dy, T* dx, const box& part, std::uint64_t seed, std::uint64_t stream,
                      double p);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/random.ipp"
#endif
