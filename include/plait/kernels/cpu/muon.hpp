// The kernels of Muon that work element by element, on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "plait/core/macros_off.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/adamw_settings.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/random.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/muon_settings.hpp"

namespace plait::kernels {

/// The momentum of one step on every tensor:
///   g = gradient * gradient_scale;  momentum += (1 - b) (g - momentum);
///   direction = g + b (momentum - g), or momentum without Nesterov.
/// Where `scalars->update` is 0, the momentum stays as it is and the direction is 0. `scalars` lies in the device's
/// memory. M and G are the same type, float or double, or G is bf16 where M is float.
template <class M, class G>
void muon_momentum(cpu& device, std::span<const muon_momentum_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars) {
  using pack = simd::pack<M>;
  const M rest = static_cast<M>(1.0 - settings.momentum), scale = static_cast<M>(scalars->gradient_scale);
  const M ahead = static_cast<M>(settings.nesterov ? settings.momentum : 1.0);
  for (const muon_momentum_tensor<M, G>& t : tensors) {
    if (scalars->update == 0) {
      fill(device, t.direction, t.size, M(0));
      continue;
    }
    simd::transform(
        t.size, t.momentum, [=](pack m, pack g) { return m + (g * scale - m) * rest; }, t.momentum, t.gradient);
    simd::transform(
        t.size, t.direction, [=](pack m, pack g) { return g * scale + (m - g * scale) * ahead; }, t.momentum,
        t.gradient);
  }
}

/// As above, with momenta in bf16, from which directions are made before they are rounded.
template <class M, class G>
void muon_momentum(cpu& device, std::span<const muon_rounded_tensor<M, G>> tensors, const muon_settings& settings,
                   const adamw_scalars* scalars) {
  constexpr std::int64_t block = 256;
  alignas(64) M momentum[block];
  alignas(64) std::uint32_t words[block];
  for (const muon_rounded_tensor<M, G>& t : tensors) {
    for (std::int64_t at = 0; at < t.size; at += block) {
      const std::int64_t n = std::min(block, t.size - at);
      for (std::int64_t i = 0; i < n; ++i) momentum[i] = converted<M>(t.momentum[at + i]);
      const muon_momentum_tensor<M, G> one{t.gradient + at, momentum, t.direction + at, n};
      muon_momentum(device, std::span<const muon_momentum_tensor<M, G>>(&one, 1), settings, scalars);
      if (scalars->update == 0) continue;
      detail::element_words(t.elements.map, t.elements.first + at, n, scalars->rounding, t.elements.stream, words);
      for (std::int64_t i = 0; i < n; ++i)
        t.momentum[at + i] = to_bf16_stochastically(static_cast<float>(momentum[i]), words[i]);
    }
  }
}

/// The update of one step on every tensor, in place:
///   master = master (1 - lr * weight_decay) - lr * scale * direction;
///   weight = master, rounded, where there is a weight.
/// Where `scalars->update` is 0, nothing. `scalars` lies in the device's memory.
template <class M, class W>
void muon_update(cpu& device, std::span<const muon_tensor<M, W>> tensors, const adamw_scalars* scalars) {
  if (scalars->update == 0) return;
  using pack = simd::pack<M>;
  for (const muon_tensor<M, W>& t : tensors) {
    const M decay = static_cast<M>(1.0 - scalars->learning_rate * t.weight_decay),
            rate = static_cast<M>(scalars->learning_rate * t.scale);
    simd::transform(
        t.size, t.master, [=](pack p, pack d) { return p * decay - d * rate; }, t.master, t.direction);
    if (t.weight != nullptr) cast(device, t.master, t.weight, t.size);
  }
}

/// y = x / (sqrt(*squares) + epsilon), of n elements; y may be x. `squares` lies in the device's memory.
template <class T>
void divide_by_norm(cpu&, const T* x, T* y, std::int64_t n, const double* squares, double epsilon) {
  const T factor = static_cast<T>(1.0 / (std::sqrt(*squares) + epsilon));
  simd::transform(
      n, y, [=](simd::pack<T> v) { return v * factor; }, x);
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
