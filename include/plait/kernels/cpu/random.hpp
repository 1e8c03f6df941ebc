#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>

#include "plait/core/box.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/philox.hpp"

/// Random numbers and dropout for the part of a tensor that a `box` describes. Every number is keyed by (seed, stream,
/// global row-major index of the element), so a tensor is the same however it is split.
namespace plait::kernels {

namespace detail {

/// Calls f(local, global, length) for every run of elements that is contiguous in the local and in the global order.
template <class F>
void for_each_run(const box& part, F f) {
  if (part.local_size() == 0) return;
  int split = part.dims;
  std::int64_t whole = 1;  // elements of the trailing dims that lie here entirely
  while (split > 0 && part.local[split - 1] == part.global[split - 1]) whole *= part.local[--split];
  if (split == 0) return f(0, 0, whole);
  --split;  // the innermost dim of which only a part lies here: a run covers that part
  const std::int64_t length = part.local[split] * whole;
  const std::int64_t runs = part.local_size() / length;
  std::array<std::int64_t, max_dims> at{};
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

/// Philox for many consecutive blocks at once, arranged so that it vectorises: words[4 * i + j] is word j of block
/// first + i.
inline constexpr std::int64_t blocks_at_once = 16;

inline void many_random_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t first, std::uint32_t* words) {
  constexpr std::int64_t n = blocks_at_once;
  alignas(64) std::uint32_t c0[n], c1[n], c2[n], c3[n];
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint64_t block = first + static_cast<std::uint64_t>(i);
    c0[i] = static_cast<std::uint32_t>(block);
    c1[i] = static_cast<std::uint32_t>(block >> 32);
    c2[i] = static_cast<std::uint32_t>(stream);
    c3[i] = static_cast<std::uint32_t>(stream >> 32);
  }
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (std::int64_t i = 0; i < n; ++i) {
      const std::uint64_t p0 = std::uint64_t{philox_multiplier_0} * c0[i];
      const std::uint64_t p1 = std::uint64_t{philox_multiplier_1} * c2[i];
      c0[i] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<std::uint32_t>(p1);
      c2[i] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<std::uint32_t>(p0);
    }
    k0 += philox_weyl_0;
    k1 += philox_weyl_1;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

/// Calls f(local, words, lane, count) for stretches of elements: element local + i has word words[lane + i].
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

inline void check_dropout(double p) {
  if (!(p >= 0.0 && p < 1.0)) fail("dropout: p = " + std::to_string(p) + ", must be at least 0 and below 1");
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
          x[local + i] = static_cast<T>(mean + std * value);
        }
      });
}

/// x uniform between low and high.
template <class T>
void fill_uniform(cpu&, T* x, const box& part, std::uint64_t seed, std::uint64_t stream, double low, double high) {
  detail::for_each_word(
      part, seed, stream, [=](std::int64_t local, const std::uint32_t* words, std::int64_t lane, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) {
          x[local + i] = static_cast<T>(low + (high - low) * to_unit(words[lane + i]));
        }
      });
}

/// y = x / (1 - p) where an element is kept, 0 with probability p. y may be x. Throws `plait::error` unless 0 <= p < 1.
template <class T>
void dropout_forward(cpu&, const T* x, T* y, const box& part, std::uint64_t seed, std::uint64_t stream, double p) {
  detail::check_dropout(p);
  const T keep = static_cast<T>(1.0 / (1.0 - p));
  const auto threshold = static_cast<std::uint32_t>(std::min(p * 0x1p32, 4294967295.0));
  detail::for_each_word(
      part, seed, stream, [=](std::int64_t local, const std::uint32_t* words, std::int64_t lane, std::int64_t count) {
        PLAIT_IVDEP
        for (std::int64_t i = 0; i < count; ++i) {
          y[local + i] = words[lane + i] >= threshold ? x[local + i] * keep : T(0);
        }
      });
}

/// dx from dy with the same mask, made anew from the same (seed, stream). dx may be dy.
template <class T>
void dropout_backward(cpu& device, const T* dy, T* dx, const box& part, std::uint64_t seed, std::uint64_t stream,
                      double p) {
  dropout_forward(device, dy, dx, part, seed, stream, p);
}

}  // namespace plait::kernels
