// Arithmetic element by element on a GPU, casts, and biases of rows; their meaning is in kernels/cpu/elementwise.hpp.
// Factors and gradients of weights are float for bf16.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"

namespace plait::kernels {

/// y = a + b
template <class T>
void add(cuda& device, const T* a, const T* b, T* y, std::int64_t n);

/// y += a; in bf16 each call rounds.
template <class T>
void accumulate(cuda& device, const T* a, T* y, std::int64_t n);

/// y *= factor, a double whatever T is: where a template's parameters compute their types, g++, which compiles nvcc's
/// side, and clang name the function differently, and do not link.
template <class T>
void scale(cuda& device, T* y, std::int64_t n, double factor);

/// y += factor * x
template <class T>
void axpy(cuda& device, const T* x, T* y, std::int64_t n, double factor);

/// y = a * b
template <class T>
void multiply(cuda& device, const T* a, const T* b, T* y, std::int64_t n);

/// y = value, which may be of any number type.
template <class T, class Value>
void fill(cuda& device, T* y, std::int64_t n, Value value);

/// y = x in another type: float, double or bf16, rounded to nearest even (double to bf16 by way of float).
template <class From, class To>
void cast(cuda& device, const From* x, To* y, std::int64_t n);

/// y[r, c] += bias[c] for y [rows, columns], whose rows are `stride` elements apart (0: columns).
template <class T>
void add_bias(cuda& device, const T* bias, T* y, std::int64_t rows, std::int64_t columns, std::int64_t stride = 0);

/// dbias[c] += sum over r of dy[r, c], whose rows are `stride` elements apart (0: columns).
template <class T>
void bias_gradient(cuda& device, const T* dy, gradient_of<T>* dbias, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride = 0);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/elementwise.ipp"
#endif
