// A step of AdamW over many tensors on a GPU, in few launches.
#pragma once

#include <cstdint>
#include <span>

#include "plait/core/compiled.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/adamw_settings.hpp"

namespace plait::kernels {

/// One step of AdamW on every tensor, in place, by one launch for 60 tensors or so:
///   g = gradient * gradient_scale;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
///   master = master (1 - lr * weight_decay) - lr / correction1 * m / (sqrt(v / correction2) + epsilon);
///   weight = master, rounded, where there is a weight.
/// Where `scalars->update` is 0, nothing. `scalars` lies in device memory. M, G, W: (float, float, float), (double,
/// double, double), (float, float, bf16), (float, bf16, bf16).
template <class M, class G, class W>
void adamw_update(cuda& device, std::span<const adamw_tensor<M, G, W>> tensors, const adamw_settings& settings,
                  const adamw_scalars* scalars);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/adamw.ipp"
#endif
