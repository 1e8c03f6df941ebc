// A step of AdamW over many tensors on the CPU. It keeps no state between steps: the optimizer is
// train/optim/adamw.hpp. Next: kernels/adamw_settings.hpp for the arguments, tests/unit/kernels/elementwise.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "plait/device/cpu.hpp"
#include "plait/kernels/adamw_settings.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

/// One step of AdamW on every tensor, in place:
///   g = gradient * gradient_scale;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
///   master = master (1 - lr * weight_decay) - lr / correction1 * m / (sqrt(v / correction2) + epsilon);
///   weight = master, rounded, where there is a weight.
/// Where `scalars->update` is 0, nothing. `scalars` lies in the device's memory. M and G are the same type, float or
/// double.
template <class M, class G, class W>
void adamw_update(cpu& device, std::span<const adamw_tensor<M, G, W>> tensors, const adamw_settings& settings,
                  const adamw_scalars* scalars) {
  if (scalars->update == 0) return;
  using pack = simd::pack<M>;
  constexpr std::int64_t w = simd::lanes<M>;
  constexpr std::int64_t block = 4096;  // elements after which the rounded copy is made, while they are in the cache
  const M rate = static_cast<M>(scalars->learning_rate / scalars->correction1);
  const M root_scale = static_cast<M>(1.0 / std::sqrt(scalars->correction2));
  const M one_minus_b1 = static_cast<M>(1.0 - settings.beta1);
  const M b2 = static_cast<M>(settings.beta2), one_minus_b2 = static_cast<M>(1.0 - settings.beta2);
  const M epsilon = static_cast<M>(settings.epsilon), g_scale = static_cast<M>(scalars->gradient_scale);
  for (const adamw_tensor<M, G, W>& t : tensors) {
    const M decay = static_cast<M>(1.0 - scalars->learning_rate * t.weight_decay);
    const auto update = [=](pack& p, pack g, pack& mean, pack& square) {
      g *= g_scale;
      mean += (g - mean) * one_minus_b1;
      square = square * b2 + g * g * one_minus_b2;
      p = p * decay - rate * mean / (simd::sqrt<M>(square) * root_scale + epsilon);
    };
    for (std::int64_t begin = 0; begin < t.size; begin += block) {
      const std::int64_t end = std::min(begin + block, t.size);
      std::int64_t i = begin;
      for (; i + w <= end; i += w) {
        pack p = simd::load(t.master + i), mean = simd::load(t.m + i), square = simd::load(t.v + i);
        update(p, simd::load(t.gradient + i), mean, square);
        simd::store<M>(p, t.master + i);
        simd::store<M>(mean, t.m + i);
        simd::store<M>(square, t.v + i);
      }
      if (const std::int64_t rest = end - i; rest > 0) {
        pack p = simd::load_some(t.master + i, rest, M(0)), mean = simd::load_some(t.m + i, rest, M(0));
        pack square = simd::load_some(t.v + i, rest, M(0));
        update(p, simd::load_some(t.gradient + i, rest, M(0)), mean, square);
        simd::store_some<M>(p, t.master + i, rest);
        simd::store_some<M>(mean, t.m + i, rest);
        simd::store_some<M>(square, t.v + i, rest);
      }
      if (t.weight != nullptr) cast(device, t.master + begin, t.weight + begin, end - begin);
    }
  }
}

}  // namespace plait::kernels
