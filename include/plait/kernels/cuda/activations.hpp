// Activation functions and their gradients on a GPU; formulas are in kernels/cpu/activations.hpp. `backward` takes the
// input x of the forward pass and dy and writes dx, which may be the array of x or of dy. Test:
// tests/cuda/kernel_elementwise.cpp.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/device/cuda.hpp"

namespace plait::kernels {

/// y = max(x, 0)
template <class T>
void relu_forward(cuda& device, const T* x, T* y, std::int64_t n);

template <class T>
void relu_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n);

/// y = x / (1 + e^-x)
template <class T>
void silu_forward(cuda& device, const T* x, T* y, std::int64_t n);

template <class T>
void silu_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n);

/// y = x Phi(x) with the exact normal distribution function Phi (Hendrycks and Gimpel 2016).
template <class T>
void gelu_forward(cuda& device, const T* x, T* y, std::int64_t n);

template <class T>
void gelu_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n);

/// y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the approximation GPT-2 uses.
template <class T>
void gelu_tanh_forward(cuda& device, const T* x, T* y, std::int64_t n);

template <class T>
void gelu_tanh_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/activations.ipp"
#endif
