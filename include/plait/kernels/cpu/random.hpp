// Random numbers and dropout on the CPU for the part of a tensor that a `box` describes. Every number is keyed by
// (seed, stream, global row-major index of the element), so a tensor's values do not depend on its division.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/philox.hpp"

namespace plait::kernels {

namespace detail {

/// Calls f(local, global, length) for every run of elements that is contiguous in the local and in the global order.
template <class F>
void for_each_run(const box& part, F f) {
  if (part.local_size() == 0) return;
  int split = part.dims;
  std::int64_t whole = 1;  // elements of the trailing dims that are whole here
  while (split > 0 && part.local[split - 1] == part.global[split - 1]) whole *= part.local[--split];
  if (split == 0) return f(0, 0, whole);
  --split;  // the innermost dim that is not whole: a run covers its part
  const std::int64_t length = part.local[split] * whole;
  const std::int64_t runs = part.local_size() / length;
  per_dim at{};
  for (std::int64_t run = 0; run < runs; ++run) {
    std::int64_t global = 0;
    for (int d = 0; d < split; ++d) global = global * part.global[d] + part.offset[d] + at[d];
    f(run * length, (global * part.global[split] + part.offset[split]) * whole, length);
    for (int d = split - 1; d >= 0; --d) {
      if (++at[d] < part.local[d]) break;
      at[d] = 0;
    }
  }
}

/// Computes Philox for many consecutive blocks at once: words[4 * i + j] is word j of block first + i. Each 32-bit word
/// has its own 64-bit lane, so that one multiplication gives both halves of a product.
inline constexpr std::int64_t blocks_at_once = 16;

PLAIT_ALWAYS_INLINE void many_random_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t first,
                                           std::uint32_t* words) {
  using pack = simd::pack<std::uint64_t>;
  constexpr std::int64_t w = simd::lanes<std::uint64_t>;
  constexpr std::uint64_t low = 0xFFFFFFFFu;
  for (std::int64_t block = 0; block < blocks_at_once; block += w) {
    pack number;
    for (std::int64_t i = 0; i < w; ++i) number[i] = first + static_cast<std::uint64_t>(block + i);
    pack c0 = number & low, c1 = number >> 32;
    pack c2 = simd::splat(stream & low), c3 = simd::splat(stream >> 32);
    std::uint64_t k0 = seed & low, k1 = seed >> 32;
    for (int round = 0; round < 10; ++round) {
      const pack p0 = c0 * std::uint64_t{philox_multiplier_0}, p1 = c2 * std::uint64_t{philox_multiplier_1};
      c0 = (p1 >> 32) ^ c1 ^ k0;
      c1 = p1 & low;
      c2 = (p0 >> 32) ^ c3 ^ k1;
      c3 = p0 & low;
      k0 = (k0 + philox_weyl_0) & low;
      k1 = (k1 + philox_weyl_1) & low;
    }
    for (std::int64_t i = 0; i < w; ++i) {
      std::uint32_t* const to = words + 4 * (block + i);
      to[0] = static_cast<std::uint32_t>(c0[i]);
      to[1] = static_cast<std::uint32_t>(c1[i]);
      to[2] = static_cast<std::uint32_t>(c2[i]);
      to[3] = static_cast<std::uint32_t>(c3[i]);
    }
  }
}

/// Calls f(local, words, lane, count) for ranges of elements: element local + i has word words[lane + i].
template <class F>
void for_each_word(const box& part, std::uint64_t seed, std::uint64_t stream, F f) {
  constexpr std::int64_t at_once = 4 * blocks_at_once;
  for_each_run(part, [&](std::int64_t local, std::int64_t global, std::int64_t length) {
    alignas(64) std::uint32_t words[at_once];
    while (length > 0) {
      const std::int64_t lane = global % 4;
      const std::int64_t count = std::min(length, at_once - lane);
      many_random_words(seed, stream, static_cast<std::uint64_t>(global / 4), words);
      f(local, words, lane, count);
      local += count;
      global += count;
      length -= count;
    }
  });
}

/// Writes the random words of `count` elements of a part, from element `first` on.
inline void element_words(const run_map& map, std::int64_t first, std::int64_t count, std::uint64_t seed,
                          std::uint64_t stream, std::uint32_t* out) {
  constexpr std::int64_t at_once = 4 * blocks_at_once;
  alignas(64) std::uint32_t words[at_once];
  while (count > 0) {
    const std::int64_t global = map.global_of_element(first), lane = global % 4;
    const std::int64_t in_run = map.runs == 1 ? count : map.length - first % map.length;
    const std::int64_t here = std::min({count, in_run, at_once - lane});
    many_random_words(seed, stream, static_cast<std::uint64_t>(global / 4), words);
    std::copy_n(words + lane, here, out);
    first += here, count -= here, out += here;
  }
}

}  // namespace detail

/// x = mean + std * normal.
template <class T>
void fill_normal(cpu&, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double mean, double std) {
  detail::for_each_word(
      part, seed, stream, [=](std::int64_t local, const std::uint32_t* words, std::int64_t lane, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int64_t pair = (lane + i) / 2 * 2;
          const double value = normal_pair(words[pair], words[pair + 1])[static_cast<std::size_t>((lane + i) % 2)];
          x[local + i] = converted<T>(mean + std * value);
        }
      });
}

/// x uniform between low and high.
template <class T>
void fill_uniform(cpu&, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double low, double high) {
  detail::for_each_word(part, seed, stream,
                        [=](std::int64_t local, const std::uint32_t* words, std::int64_t lane, std::int64_t count) {
                          for (std::int64_t i = 0; i < count; ++i) {
                            x[local + i] = converted<T>(low + (high - low) * to_unit(words[lane + i]));
                          }
                        });
}

/// y = x / (1 - p) for kept elements; with probability p an element is dropped, and y = x times 0. y may be x. Throws
/// `plait::error` unless 0 <= p < 1.
template <class T>
void dropout_forward(cpu&, const T* x, T* y, const box& part, std::uint64_t seed, std::uint64_t stream, double p) {
  check_dropout(p);
  using A = arithmetic<T>;
  const A keep = static_cast<A>(1.0 / (1.0 - p));
  const auto threshold = static_cast<std::uint32_t>(std::min(p * 0x1p32, 4294967295.0));
  detail::for_each_word(
      part, seed, stream, [=](std::int64_t local, const std::uint32_t* words, std::int64_t lane, std::int64_t count) {
        constexpr std::int64_t n = 4 * detail::blocks_at_once;
        alignas(64) A factor[n];
        for (std::int64_t i = 0; i < n; ++i) factor[i] = words[i] >= threshold ? keep : A(0);
        simd::transform(
            count, y + local, [](simd::pack<T> v, simd::pack<T> f) { return v * f; }, x + local, factor + lane);
      });
}

/// dx from dy with the mask of the forward pass, which is computed again from its (seed, stream). dx may be dy.
template <class T>
void dropout_backward(cpu& device, const T* dy, T* dx, const box& part, std::uint64_t seed, std::uint64_t stream,
                      double p) {
  dropout_forward(device, dy, dx, part, seed, stream, p);
}

PLAIT_COMPILED_TEMPLATE(void dropout_forward(cpu&, const float*, float*, const box&, std::uint64_t, std::uint64_t,
                                             double))
PLAIT_COMPILED_TEMPLATE(void dropout_forward(cpu&, const bf16*, bf16*, const box&, std::uint64_t, std::uint64_t,
                                             double))
PLAIT_COMPILED_TEMPLATE(void dropout_forward(cpu&, const double*, double*, const box&, std::uint64_t, std::uint64_t,
                                             double))

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
