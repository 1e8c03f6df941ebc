// Sums on a GPU into a number in its memory, and numbers that are computed from such ones. Every sum is made of one
// partial sum per chunk of elements, in double, which one block then adds in order: the result depends neither on the
// device nor on which block came first. Sums over ranks are collectives.
#pragma once

#include <cstdint>
#include <span>

#include "plait/core/compiled.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/elements.hpp"
#include "plait/kernels/exact_squares.hpp"
#include "plait/kernels/value_digest.hpp"

namespace plait::kernels {

/// *out = the sum of n elements. These sums are no calls of CUB's `DeviceReduce`: its order of sums follows the number
/// of the GPU's multiprocessors, and it takes one array a call, where gradients are hundreds.
template <class S>
void sum(cuda& device, const S* x, std::int64_t n, double* out);

/// *out = the digest of n elements: numbers, token ids or positions. Its sketches are summed in any order, and its hash
/// is not affected by that.
template <class T>
void digest(cuda& device, const T* x, std::int64_t n, value_digest* out);

/// *out += the sum of the squares of all elements of all parts.
template <class G>
void add_sum_squares(cuda& device, std::span<const const_elements<G>> parts, double* out);

/// *out = the sum of n elements, each rounded to a multiple of `quantum`: exact, so that it depends on no order.
template <class S>
void sum_of_multiples(cuda& device, const S* x, std::int64_t n, double quantum, double* out);

/// Adds the squares of all elements of all parts to `bins`, as integers (kernels/exact_squares.hpp).
template <class G>
void add_exact_squares(cuda& device, std::span<const const_elements<G>> parts, std::int64_t* bins);
/// *out = the sum that the bins are.
void sum_of_bins(cuda& device, const std::int64_t* bins, double* out);

/// *y = 1 / *x where *x > 0, else 0.
void reciprocal(cuda& device, const double* x, double* y);

/// y[i] = *value, rounded to T.
template <class T>
void fill_from(cuda& device, T* y, std::int64_t n, const double* value);

/// norm = sqrt(*squares), factor = what clipping to `limit` multiplies gradients with: PyTorch's clip_grad_norm_,
/// limit / (norm + 1e-6) where that is below 1 (a limit of 0 does not clip), and update = 1, or 0 where the norm is not
/// finite: then the step must be skipped, and factor is 0.
void clip(cuda& device, const double* squares, double limit, clip_numbers* out);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/reductions.ipp"
#endif
