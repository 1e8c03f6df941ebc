// The element-wise kernels of AdamW and Muon on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>

#include "plait/core/macros_off.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/random.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/moments.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels {

// AdamW.

namespace detail {

/// The numbers of a step in the type of the arithmetic, and the update of some elements.
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

  /// G is A, or bf16 for float A, and has as many lanes as A.
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

/// Returns the factor of weights with weight decay.
template <class A>
A adamw_decay(const adamw_scalars& scalars, double weight_decay) {
  return static_cast<A>(1.0 - scalars.learning_rate * weight_decay);
}

}  // namespace detail

/// One step of AdamW on every tensor, in place:
///   g = gradient * gradient_scale;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
///   master = master (1 - lr * weight_decay) - lr / correction1 * m / (sqrt(v / correction2) + epsilon);
///   weight = master, rounded, where there is a weight.
/// If `scalars->update` is 0, nothing changes. `scalars` is in the device's memory. M and G are both float or both
/// double, or M is float and G bf16.
template <class M, class G, class W>
void adamw_update(cpu& device, std::span<const adamw_tensor<M, G, W>> tensors, const adamw_settings& settings,
                  const adamw_scalars* scalars) {
  if (scalars->update == 0) return;
  // Rounded copies are written after this many elements, while these are in the cache.
  constexpr std::int64_t block = 4096;
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

// Moments or values that are rounded stochastically for memory. Each block is widened, updated as above, and rounded.

namespace detail {

/// Widens the moments of `n` elements of one block. `scale` is the block's scale, for codes.
template <class A, class S>
void widen_moments(const S* from, std::uint8_t scale, bool second, A* to, std::int64_t n) {
  if constexpr (std::is_same_v<S, std::uint8_t>) {
    for (std::int64_t i = 0; i < n; ++i)
      to[i] = static_cast<A>(second ? second_moment(from[i], scale) : first_moment(from[i], scale));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = converted<A>(from[i]);
  }
}

/// Rounds moments back to their stored type, and returns the block's new scale. First moments use the lower half of
/// each element's random word, second moments the upper half.
template <class A, class S>
std::uint8_t round_moments(const A* from, bool second, const std::uint32_t* words, S* to, std::int64_t n) {
  const int shift = second ? 16 : 0;
  if constexpr (std::is_same_v<S, std::uint8_t>) {
    float most = 0;
    for (std::int64_t i = 0; i < n; ++i) most = std::max(most, std::abs(static_cast<float>(from[i])));
    const std::uint8_t scale = moment_scale(most);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto x = static_cast<float>(from[i]);
      to[i] = second ? second_moment_code(x, scale, words[i] >> shift) : first_moment_code(x, scale, words[i] >> shift);
    }
    return scale;
  } else if constexpr (std::is_same_v<S, A>) {
    std::copy_n(from, n, to);
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = to_bf16_stochastically(static_cast<float>(from[i]), words[i] >> shift);
  }
  return 0;
}

}  // namespace detail

/// One step of AdamW on every tensor, in place, by the formula of `adamw_update`, with moments that are rounded for
/// memory. If M is bf16, values are rounded too; they are updated with the moments before rounding. An element's result
/// depends only on its own numbers and, with moments as codes, on its block's. G is the type of the arithmetic, or bf16
/// for float. S is the type of the arithmetic, bf16 or std::uint8_t.
template <class M, class G, class W, class S>
void adamw_update(cpu& device, std::span<const adamw_rounded_tensor<M, G, W, S>> tensors,
                  const adamw_settings& settings, const adamw_scalars* scalars) {
  if (scalars->update == 0) return;
  using A = arithmetic<M>;
  constexpr bool codes = std::is_same_v<S, std::uint8_t>, in_place = std::is_same_v<M, A>;
  const detail::adamw_arithmetic<A> numbers(settings, *scalars);
  alignas(64) A value[moment_block], m[moment_block], v[moment_block];
  alignas(64) std::uint32_t words[moment_block];
  for (const adamw_rounded_tensor<M, G, W, S>& t : tensors) {
    const A decay = detail::adamw_decay<A>(*scalars, t.weight_decay);
    const auto draw = [&](std::uint64_t seed, std::int64_t at, std::int64_t n) {
      detail::element_words(t.elements.map, t.elements.first + at, n, seed, t.elements.stream, words);
    };
    for (std::int64_t at = 0, block = 0; at < t.size; ++block) {
      const std::int64_t n = std::min((block + 1) * moment_block - t.begin, t.size) - at;
      detail::widen_moments(t.m + at, codes ? t.m_scales[block] : std::uint8_t{0}, false, m, n);
      detail::widen_moments(t.v + at, codes ? t.v_scales[block] : std::uint8_t{0}, true, v, n);
      if constexpr (in_place) {
        numbers.update(t.master + at, t.gradient + at, m, v, n, decay);
      } else {
        for (std::int64_t i = 0; i < n; ++i) value[i] = widened(t.master[at + i]);
        numbers.update(value, t.gradient + at, m, v, n, decay);
        draw(value_rounding(scalars->rounding), at, n);
        for (std::int64_t i = 0; i < n; ++i) t.master[at + i] = to_bf16_stochastically(value[i], words[i]);
      }
      if constexpr (!std::is_same_v<S, A>) draw(scalars->rounding, at, n);
      const std::uint8_t m_scale = detail::round_moments(m, false, words, t.m + at, n);
      const std::uint8_t v_scale = detail::round_moments(v, true, words, t.v + at, n);
      if constexpr (codes) t.m_scales[block] = m_scale, t.v_scales[block] = v_scale;
      if (t.weight != nullptr) cast(device, t.master + at, t.weight + at, n);
      at += n;
    }
  }
}

// Muon.

/// The momentum of one step on every tensor:
///   g = gradient * gradient_scale;  momentum += (1 - b) (g - momentum);
///   direction = g + b (momentum - g), or momentum without Nesterov.
/// If `scalars->update` is 0, the momentum does not change, and the direction is 0. `scalars` is in the device's
/// memory. M and G are both float or both double, or M is float and G bf16.
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

/// This overload has momenta in bf16. It computes directions from the momenta before it rounds these.
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
/// If `scalars->update` is 0, nothing changes. `scalars` is in the device's memory.
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

/// y = x / (sqrt(*squares) + epsilon), for n elements; y may be x. `squares` is in the device's memory.
template <class T>
void divide_by_norm(cpu&, const T* x, T* y, std::int64_t n, const double* squares, double epsilon) {
  const T factor = static_cast<T>(1.0 / (std::sqrt(*squares) + epsilon));
  simd::transform(
      n, y, [=](simd::pack<T> v) { return v * factor; }, x);
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
