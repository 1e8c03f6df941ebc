// Layer norm on a GPU; the steps and their meaning are in kernels/cpu/norms.hpp. For bf16 the sums, mean, inv_std,
// dweight and dbias are float.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"

namespace plait::kernels {

/// out[r] = sum over c of x[r, c].
template <class T>
void row_sums(cuda& device, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns);

/// out[r] = sum over the local columns of (x - mean)^2, where mean = sums[r] / columns_global.
template <class T>
void row_centred_squares(cuda& device, const T* x, const statistic_of<T>* sums, statistic_of<T>* out, std::int64_t rows,
                         std::int64_t columns, std::int64_t columns_global);

/// mean and inv_std of whole rows from the two reduced sums; either may be written over its source.
template <class S>
void layer_norm_statistics(cuda& device, const S* sums, const S* centred_squares, S* mean, S* inv_std,
                           std::int64_t rows, std::int64_t columns_global, double eps);

/// y = (x - mean) inv_std w + b; y may be x.
template <class T>
void layer_norm_apply(cuda& device, const T* x, const statistic_of<T>* mean, const statistic_of<T>* inv_std,
                      const T* weight, const T* bias, T* y, std::int64_t rows, std::int64_t columns);

/// The whole forward pass where rows are whole; writes y, mean and inv_std. Reads x once. Where `addend` is not null,
/// its input is x + addend, rounded to T, which goes to `sum`; sum may be x.
template <class T>
void layer_norm_forward(cuda& device, const T* x, const T* weight, const T* bias, T* y, statistic_of<T>* mean,
                        statistic_of<T>* inv_std, std::int64_t rows, std::int64_t columns, double eps,
                        const std::type_identity_t<T>* addend = nullptr, std::type_identity_t<T>* sum = nullptr);

/// dots[r, 0] = sum of dy w and dots[r, 1] = sum of dy w (x - mean) inv_std over the local columns; dots is [rows, 2].
template <class T>
void layer_norm_backward_dots(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                              const statistic_of<T>* inv_std, statistic_of<T>* dots, std::int64_t rows,
                              std::int64_t columns);

/// dx = inv_std (dy w - (dots[r, 0] + normalised x * dots[r, 1]) / columns_global) from the dots of the whole rows; dx
/// may be dy. `addend` (such as the gradient of a residual connection) is added where it is not null; it must not be
/// dx.
template <class T>
void layer_norm_backward_dx(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                            const statistic_of<T>* inv_std, const statistic_of<T>* dots, T* dx, std::int64_t rows,
                            std::int64_t columns, std::int64_t columns_global,
                            const std::type_identity_t<T>* addend = nullptr);

/// dweight[c] += sum over r of dy (x - mean) inv_std and dbias[c] += sum over r of dy; dbias may be null. One pass.
template <class T>
void layer_norm_backward_dweight(cuda& device, const T* x, const T* dy, const statistic_of<T>* mean,
                                 const statistic_of<T>* inv_std, gradient_of<T>* dweight, gradient_of<T>* dbias,
                                 std::int64_t rows, std::int64_t columns);

/// The whole backward pass where rows are whole. dx or dweight may be null, which skips it (dbias goes with dweight);
/// dweight and dbias are added to, dx may be dy if dweight is null. `addend` is added to dx where it is not null; it
/// must not be dx.
template <class T>
void layer_norm_backward(cuda& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                         const statistic_of<T>* inv_std, T* dx, gradient_of<T>* dweight, gradient_of<T>* dbias,
                         std::int64_t rows, std::int64_t columns, const std::type_identity_t<T>* addend = nullptr);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/layer_norm.ipp"
#endif
