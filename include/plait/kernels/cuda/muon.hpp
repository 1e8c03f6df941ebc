// The kernels of Muon that work element by element, on a GPU, many tensors in one launch.
#pragma once

#include <cstdint>
#include <span>

#include "plait/core/compiled.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/adamw_settings.hpp"
#include "plait/kernels/muon_settings.hpp"

namespace plait::kernels {

/// The momentum of one step on every tensor:
///   g = gradient * gradient_scale;  momentum += (1 - b) (g - momentum);
///   direction = g + b (momentum - g), or momentum without Nesterov.
/// Where `scalars->update` is 0, the momentum stays as it is and the direction is 0. `scalars` lies in device memory.
/// M, G: (float, float), (double, double), (float, bf16).
template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_momentum_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars);

/// As above, with momenta in bf16, rounded by the processor's random bits.
template <class M, class G>
void muon_momentum(cuda& device, std::span<const muon_rounded_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars);

/// The update of one step on every tensor, in place:
///   master = master (1 - lr * weight_decay) - lr * scale * direction;
///   weight = master, rounded, where there is a weight.
/// Where `scalars->update` is 0, nothing. `scalars` lies in device memory. M, W: (float, float), (double, double),
/// (float, bf16).
template <class M, class W>
void muon_update(cuda& device, std::span<const muon_tensor<M, W>> tensors, const adamw_scalars* scalars);

/// y = x / (sqrt(*squares) + epsilon), of n elements; y may be x. `squares` lies in device memory. T: float, double.
template <class T>
void divide_by_norm(cuda& device, const T* x, T* y, std::int64_t n, const double* squares, double epsilon);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/muon.ipp"
#endif
