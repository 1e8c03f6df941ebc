// RMS norm on a GPU; the steps and their meaning are in kernels/cpu/norms.hpp. For bf16 the sums, inv_rms and
// dweight are float.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"

namespace plait::kernels {

/// out[r] = sum over c of x[r, c]^2.
template <class T>
void row_sum_squares(cuda& device, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns);

/// inv_rms[r] from the sum of the squares of the whole row; inv_rms may be the array of sum_squares.
template <class S>
void rms_inverse(cuda& device, const S* sum_squares, S* inv_rms, std::int64_t rows, std::int64_t columns_global,
                 double eps);

/// y from the sums of the squares of the whole rows; y may be x.
template <class T>
void rms_apply(cuda& device, const T* x, const statistic_of<T>* sum_squares, const T* weight, T* y, std::int64_t rows,
               std::int64_t columns, std::int64_t columns_global, double eps);

/// The whole forward pass where rows are whole; writes y and inv_rms. Reads x once. Where `addend` is not null, its
/// input is x + addend, rounded to T, which goes to `sum`; sum may be x.
template <class T>
void rms_norm_forward(cuda& device, const T* x, const T* weight, T* y, statistic_of<T>* inv_rms, std::int64_t rows,
                      std::int64_t columns, double eps, const std::type_identity_t<T>* addend = nullptr,
                      std::type_identity_t<T>* sum = nullptr);

/// dot[r] = sum over the local columns of dy w x.
template <class T>
void rms_norm_backward_dot(cuda& device, const T* x, const T* weight, const T* dy, statistic_of<T>* dot,
                           std::int64_t rows, std::int64_t columns);

/// dx from the dots of the whole rows, plus `addend` (such as the gradient of a residual connection) where that is not
/// null; dx may be dy, not addend.
template <class T>
void rms_norm_backward_dx(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* inv_rms,
                          const statistic_of<T>* dot, T* dx, std::int64_t rows, std::int64_t columns,
                          std::int64_t columns_global, const std::type_identity_t<T>* addend = nullptr);

/// dweight[c] += sum over r of dy x inv_rms.
template <class T>
void rms_norm_backward_dweight(cuda& device, const T* x, const T* dy, const statistic_of<T>* inv_rms,
                               gradient_of<T>* dweight, std::int64_t rows, std::int64_t columns);

/// dx (must not be dy) and dweight (added to) from the dots of the whole rows.
template <class T>
void rms_norm_backward_apply(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* inv_rms,
                             const statistic_of<T>* dot, T* dx, gradient_of<T>* dweight, std::int64_t rows,
                             std::int64_t columns, std::int64_t columns_global);

/// The whole backward pass where rows are whole. Either of dx and dweight may be null, which skips it; dweight is added
/// to, dx may be dy if dweight is null. `addend` (such as the gradient of a residual connection) is added to dx where
/// it is not null; it must not be dx.
template <class T>
void rms_norm_backward(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* inv_rms, T* dx,
                       gradient_of<T>* dweight, std::int64_t rows, std::int64_t columns,
                       const std::type_identity_t<T>* addend = nullptr);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/rms_norm.ipp"
#endif
