// Every kernel. The type of its first argument, the device, selects the implementation; the others are raw pointers
// into that device's memory, sizes and scalars. T is float, double or bf16. For bf16, statistics and gradients of
// weights are float (core/types.hpp). nvcc does not see the kernels of the CPU.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/types.hpp"

#ifndef PLAIT_NO_CPU
#include "plait/kernels/cpu/attention.hpp"
#include "plait/kernels/cpu/cross_entropy.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/embedding.hpp"
#include "plait/kernels/cpu/experts.hpp"
#include "plait/kernels/cpu/norms.hpp"
#include "plait/kernels/cpu/optimizer.hpp"
#include "plait/kernels/cpu/random.hpp"
#include "plait/kernels/cpu/reductions.hpp"
#endif

#if defined(PLAIT_CUDA_KERNELS) || defined(PLAIT_COMPILED_CUDA)
#include "plait/kernels/cuda/kernels.hpp"
#endif

#if defined(PLAIT_NO_CPU) && !defined(PLAIT_CUDA_KERNELS) && !defined(PLAIT_COMPILED_CUDA)
#error "plait: PLAIT_NO_CPU leaves out the CPU, and PLAIT_COMPILED_CUDA is not defined: there is no device for layers"
#endif

#include "plait/kernels/counting.hpp"

namespace plait::kernels {

/// Refuses attention that a device cannot run; see kernels/cuda/attention.hpp. CPUs can run all.
template <class Device>
void require_attention(const Device&, dtype, std::int64_t) {}

}  // namespace plait::kernels
