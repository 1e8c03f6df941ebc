// SwiGLU on a GPU; the formula and the arrays are those of kernels/cpu/activations.hpp. The matrix products before and
// after it are the layer's, nn/mlp.hpp. Test: tests/cuda/kernel_elementwise.cpp.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/device/cuda.hpp"

namespace plait::kernels {

template <class T>
void swiglu_forward(cuda& device, const T* gate_up, T* y, std::int64_t rows, std::int64_t ffn);

/// dgate_up [rows, 2, ffn] from the forward input and dy; dgate_up may be the array of gate_up.
template <class T>
void swiglu_backward(cuda& device, const T* gate_up, const T* dy, T* dgate_up, std::int64_t rows, std::int64_t ffn);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/swiglu.ipp"
#endif
