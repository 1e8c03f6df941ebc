// A step of AdamW on the CPU whose moments or values are rounded stochastically for memory: block after block, they are
// widened, updated as kernels/cpu/adamw.hpp does it, and rounded.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>

#include "plait/core/macros_off.hpp"
#include "plait/kernels/cpu/adamw.hpp"
#include "plait/kernels/cpu/random.hpp"
#include "plait/kernels/moments.hpp"

namespace plait::kernels {

namespace detail {

/// The moments of `n` elements of one block, widened. `scale` is the block's, of codes.
template <class A, class S>
void widen_moments(const S* from, std::uint8_t scale, bool second, A* to, std::int64_t n) {
  if constexpr (std::is_same_v<S, std::uint8_t>) {
    for (std::int64_t i = 0; i < n; ++i)
      to[i] = static_cast<A>(second ? second_moment(from[i], scale) : first_moment(from[i], scale));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = converted<A>(from[i]);
  }
}

/// Rounds them again, by the lower half of each element's word for first moments and the upper one for second ones, and
/// returns the block's new scale.
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

/// One step of AdamW on every tensor, in place, as `adamw_update` of kernels/cpu/adamw.hpp does it, with moments that
/// are rounded for memory, and where M is bf16, values too: they are updated by moments that are not rounded yet. An
/// element's result depends on its own numbers and, where moments are codes, on its block's alone. G is the type of the
/// arithmetic, or bf16 for floats; S is the type of the arithmetic, bf16 or std::uint8_t.
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

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
