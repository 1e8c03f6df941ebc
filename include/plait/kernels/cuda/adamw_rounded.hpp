// A step of AdamW on a GPU whose moments or values are rounded stochastically for memory.
#pragma once

#include <cstdint>
#include <span>

#include "plait/core/compiled.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/adamw_settings.hpp"

namespace plait::kernels {

/// One step of AdamW on every tensor, in place, by the formula of kernels/cuda/adamw.hpp, with moments that are rounded
/// for memory, and where M is bf16, values too. The random bits are the processor's. `scalars` lies in device memory. G
/// is the type of the arithmetic, or bf16 for floats; S is the type of the arithmetic, bf16 or std::uint8_t.
template <class M, class G, class W, class S>
void adamw_update(cuda& device, std::span<const adamw_rounded_tensor<M, G, W, S>> tensors,
                  const adamw_settings& settings, const adamw_scalars* scalars);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/adamw_rounded.ipp"
#endif
