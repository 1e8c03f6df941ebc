// A step of AdamW over many tensors on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "plait/core/macros_off.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/adamw_settings.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

namespace detail {

/// The numbers of a step in the type of the arithmetic, and what they do to some elements.
template <class A>
struct adamw_arithmetic {
  A rate, root_scale, one_minus_b1, b2, one_minus_b2, epsilon, gradient_scale;

  adamw_arithmetic(const adamw_settings& settings, const adamw_scalars& scalars)
      : rate(static_cast<A>(scalars.learning_rate / scalars.correction1)),
        root_scale(static_cast<A>(1.0 / std::sqrt(scalars.correction2))),
        one_minus_b1(static_cast<A>(1.0 - settings.beta1)),
        b2(static_cast<A>(settings.beta2)),
        one_minus_b2(static_cast<A>(1.0 - settings.beta2)),
        epsilon(static_cast<A>(settings.epsilon)),
        gradient_scale(static_cast<A>(scalars.gradient_scale)) {}

  /// G has as many lanes as A: it is A, or bf16 for floats.
  template <class G>
  void update(A* master, const G* gradient, A* m, A* v, std::int64_t n, A decay) const {
    using pack = simd::pack<A>;
    constexpr std::int64_t w = simd::lanes<A>;
    const auto step = [=, *this](pack& p, pack g, pack& mean, pack& square) {
      g *= gradient_scale;
      mean += (g - mean) * one_minus_b1;
      square = square * b2 + g * g * one_minus_b2;
      p = p * decay - rate * mean / (simd::sqrt<A>(square) * root_scale + epsilon);
    };
    std::int64_t i = 0;
    for (; i + w <= n; i += w) {
      pack p = simd::load(master + i), mean = simd::load(m + i), square = simd::load(v + i);
      step(p, simd::load(gradient + i), mean, square);
      simd::store<A>(p, master + i);
      simd::store<A>(mean, m + i);
      simd::store<A>(square, v + i);
    }
    if (const std::int64_t rest = n - i; rest > 0) {
      pack p = simd::load_some(master + i, rest, A(0)), mean = simd::load_some(m + i, rest, A(0));
      pack square = simd::load_some(v + i, rest, A(0));
      step(p, simd::load_some(gradient + i, rest, A(0)), mean, square);
      simd::store_some<A>(p, master + i, rest);
      simd::store_some<A>(mean, m + i, rest);
      simd::store_some<A>(square, v + i, rest);
    }
  }
};

/// The factor of weights that decay.
template <class A>
A adamw_decay(const adamw_scalars& scalars, double weight_decay) {
  return static_cast<A>(1.0 - scalars.learning_rate * weight_decay);
}

}  // namespace detail

/// One step of AdamW on every tensor, in place:
///   g = gradient * gradient_scale;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
///   master = master (1 - lr * weight_decay) - lr / correction1 * m / (sqrt(v / correction2) + epsilon);
///   weight = master, rounded, where there is a weight.
/// Where `scalars->update` is 0, nothing. `scalars` lies in the device's memory. M and G are the same type, float or
/// double, or G is bf16 where M is float.
template <class M, class G, class W>
void adamw_update(cpu& device, std::span<const adamw_tensor<M, G, W>> tensors, const adamw_settings& settings,
                  const adamw_scalars* scalars) {
  if (scalars->update == 0) return;
  constexpr std::int64_t block = 4096;  // elements after which the rounded copy is made, while they are in the cache
  const detail::adamw_arithmetic<M> numbers(settings, *scalars);
  for (const adamw_tensor<M, G, W>& t : tensors) {
    const M decay = detail::adamw_decay<M>(*scalars, t.weight_decay);
    for (std::int64_t begin = 0; begin < t.size; begin += block) {
      const std::int64_t n = std::min(block, t.size - begin);
      numbers.update(t.master + begin, t.gradient + begin, t.m + begin, t.v + begin, n, decay);
      if (t.weight != nullptr) cast(device, t.master + begin, t.weight + begin, n);
    }
  }
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
