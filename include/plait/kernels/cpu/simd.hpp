// Vector registers for the kernels of the CPU: packs of numbers, an exponential, and loops over arrays that map, sum
// and find maxima. A pack is as wide as the registers of the file's target. A pack of bf16 holds floats: loads widen
// them, and stores round them. Test: tests/unit/kernels/simd.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

/// Tells the compiler that iterations of the next loop are independent. Its pointers may be equal, but must not overlap
/// with a shift.
#if defined(__clang__)
#define PLAIT_IVDEP _Pragma("clang loop vectorize(assume_safety)")
#else
#define PLAIT_IVDEP _Pragma("GCC ivdep")
#endif

#define PLAIT_ALWAYS_INLINE inline __attribute__((always_inline))

namespace plait::kernels::simd {

/// Size of a vector register of the target.
#if defined(__AVX512F__)
inline constexpr int pack_bytes = 64;
#elif defined(__AVX__)
inline constexpr int pack_bytes = 32;
#else
inline constexpr int pack_bytes = 16;
#endif

/// A register of T, by the vector extension that g++ and clang share. Sums and maxima of packs need no relaxed
/// floating-point flags.
template <class T, int Bytes = pack_bytes>
struct pack_of {
  typedef T type __attribute__((vector_size(Bytes)));
};
template <int Bytes>
struct pack_of<bf16, Bytes> : pack_of<float, Bytes> {};
template <class T>
using pack = typename pack_of<T>::type;

template <class T>
inline constexpr std::int64_t lanes = pack_bytes / static_cast<std::int64_t>(sizeof(arithmetic<T>));

template <class T>
PLAIT_ALWAYS_INLINE pack<T> splat(T value) {
  return value - pack<T>{};
}

/// A vector of as many bf16 as a pack has lanes.
using bf16_bits = typename pack_of<std::uint16_t, pack_bytes / 2>::type;

template <class T>
PLAIT_ALWAYS_INLINE pack<T> load(const T* from) {
  if constexpr (std::is_same_v<T, bf16>) {
    bf16_bits half;
    std::memcpy(&half, from, sizeof half);
    return pack<float>(__builtin_convertvector(half, pack<std::uint32_t>) << 16);
  } else {
    pack<T> p;
    std::memcpy(&p, from, pack_bytes);
    return p;
  }
}

/// Loads the first `count` lanes from memory, and sets the others to `fill`.
template <class T>
PLAIT_ALWAYS_INLINE pack<T> load_some(const T* from, std::int64_t count, arithmetic<T> fill) {
  alignas(64) arithmetic<T> lane[lanes<T>];
  for (std::int64_t i = 0; i < lanes<T>; ++i) lane[i] = i < count ? widened(from[i]) : fill;
  return load(lane);
}

/// Stores bf16 rounded as by `to_bf16`.
template <class T>
PLAIT_ALWAYS_INLINE void store(pack<T> p, T* to) {
  if constexpr (std::is_same_v<T, bf16>) {
    using words = pack<std::uint32_t>;
    const words bits = words(p), upper = bits >> 16;
    const words rounded = (bits + 0x7FFFu + (upper & 1u)) >> 16;
    const words kept = (bits & 0x7FFFFFFFu) > 0x7F800000u ? (upper | 0x40u) : rounded;
    const bf16_bits half = __builtin_convertvector(kept, bf16_bits);
    std::memcpy(static_cast<void*>(to), &half, sizeof half);
  } else {
    std::memcpy(to, &p, pack_bytes);
  }
}

template <class T>
PLAIT_ALWAYS_INLINE void store_some(pack<T> p, T* to, std::int64_t count) {
  alignas(64) T lane[lanes<T>];
  store<T>(p, lane);
  for (std::int64_t i = 0; i < count; ++i) to[i] = lane[i];
}

template <class T>
PLAIT_ALWAYS_INLINE pack<T> max(pack<T> a, pack<T> b) {
  return a > b ? a : b;
}

template <class T>
PLAIT_ALWAYS_INLINE pack<T> sqrt(pack<T> x) {
#if defined(__AVX512F__)
  // Compilers do not vectorise the loop below, and <immintrin.h> takes a fifth of a second to compile.
  pack<T> root;
  if constexpr (std::is_same_v<T, float>)
    asm("vsqrtps %1, %0" : "=v"(root) : "v"(x));
  else
    asm("vsqrtpd %1, %0" : "=v"(root) : "v"(x));
  return root;
#else
  pack<T> root{};
  for (std::int64_t i = 0; i < lanes<T>; ++i) root[i] = std::sqrt(x[i]);
  return root;
#endif
}

/// e^x. The argument is split into n ln 2 + r with |r| <= ln(2)/2 (Cody and Waite). e^r is its Taylor series up to the
/// last term of at least a tenth of the last bit. Relative error below 1e-7 (float) or 4e-16 (double). Results that
/// would be subnormal become 0, -infinity gives 0, and overflow gives infinity.
template <class Element>
PLAIT_ALWAYS_INLINE pack<Element> exp(pack<Element> x) {
  using T = arithmetic<Element>;
  using integer = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
  constexpr bool single = sizeof(T) == 4;
  constexpr T high = single ? T(88.72283) : T(709.782712893384);
  constexpr T low = single ? T(-87.33654) : T(-708.3964185322641);
  constexpr T log2_e = T(1.4426950408889634074);
  constexpr T ln2_high = single ? T(0.693359375) : T(6.93145751953125e-1);
  constexpr T ln2_low = single ? T(-2.12194440e-4) : T(1.42860682030941723212e-6);
  constexpr T rounder = single ? T(12582912.0) : T(6755399441055744.0);  // 1.5 * 2^(mantissa bits): adding it rounds
  const pack<T> in_range = x > splat(high) ? splat(high) : x;
  const pack<T> clamped = in_range < splat(low) ? splat(low) : in_range;
  const pack<T> shifted = clamped * log2_e + rounder;
  const pack<T> n = shifted - rounder;
  const pack<T> r = (clamped - n * ln2_high) - n * ln2_low;
  pack<T> series;
  if constexpr (single) {
    series = splat(T(1.0 / 5040));
    series = series * r + T(1.0 / 720);
    series = series * r + T(1.0 / 120);
  } else {
    series = splat(T(1.0 / 6227020800.0));
    series = series * r + T(1.0 / 479001600.0);
    series = series * r + T(1.0 / 39916800.0);
    series = series * r + T(1.0 / 3628800.0);
    series = series * r + T(1.0 / 362880.0);
    series = series * r + T(1.0 / 40320.0);
    series = series * r + T(1.0 / 5040.0);
    series = series * r + T(1.0 / 720.0);
    series = series * r + T(1.0 / 120.0);
  }
  series = series * r + T(1.0 / 24);
  series = series * r + T(1.0 / 6);
  series = series * r + T(0.5);
  const pack<T> power_of_r = r * (r * series) + r + T(1);
  // Computes 2^n by the exponent bits, in two factors, because n may be one more than the largest exponent.
  constexpr int mantissa = single ? 23 : 52;
  constexpr integer bias = single ? 127 : 1023;
  constexpr integer rounder_bits = single ? integer(0x4B400000) : integer(0x4338000000000000);
  using integers = pack<integer>;
  const integers exponent = integers(shifted) - rounder_bits;
  const integers half = exponent >> 1;
  const pack<T> scale_a = pack<T>((half + bias) << mantissa);
  const pack<T> scale_b = pack<T>((exponent - half + bias) << mantissa);
  const pack<T> value = power_of_r * scale_a * scale_b;
  const pack<T> floored = x < splat(low) ? pack<T>{} : value;
  const pack<T> capped = x > splat(high) ? splat(std::numeric_limits<T>::infinity()) : floored;
  return x != x ? x : capped;
}

/// Reduces the lanes to one value with `combine`, upper half on lower half.
template <class T, int Bytes = pack_bytes, class F>
PLAIT_ALWAYS_INLINE T fold(typename pack_of<T, Bytes>::type p, F combine) {
  if constexpr (Bytes > 16) {
    typename pack_of<T, Bytes / 2>::type low, high;
    std::memcpy(&low, &p, Bytes / 2);
    std::memcpy(&high, reinterpret_cast<const char*>(&p) + Bytes / 2, Bytes / 2);
    return fold<T, Bytes / 2>(combine(low, high), combine);
  } else if constexpr (sizeof(T) == 4) {
    return combine(combine(p[0], p[2]), combine(p[1], p[3]));
  } else {
    return combine(p[0], p[1]);
  }
}

template <class T>
PLAIT_ALWAYS_INLINE arithmetic<T> lane_sum(pack<T> p) {
  return fold<arithmetic<T>>(p, [](auto a, auto b) { return a + b; });
}

template <class T>
PLAIT_ALWAYS_INLINE arithmetic<T> lane_max(pack<T> p) {
  return fold<arithmetic<T>>(p, [](auto a, auto b) { return a > b ? a : b; });
}

/// to[i] = f(from_0[i], from_1[i], ...) where f works on packs. `to` may equal an input. The loop's body and its tail
/// compute elements in the same way, so a value does not depend on the start of a shard.
template <class T, class F, class... From>
PLAIT_ALWAYS_INLINE void transform(std::int64_t n, T* to, F f, const From*... from) {
  static_assert(((lanes<From> == lanes<T>)&&...));
  std::int64_t i = 0;
  for (; i + lanes<T> <= n; i += lanes<T>) store<T>(f(load(from + i)...), to + i);
  if (i < n) store_some<T>(f(load_some(from + i, n - i, 0)...), to + i, n - i);
}

/// Returns the sum over i of f(from_0[i], from_1[i], ...), where f works on packs. It adds to four packs, whose sum is
/// added to a double every 64 packs. So a float sum of any length is accurate to the last bits.
template <class T, class F, class... From>
PLAIT_ALWAYS_INLINE double sum_of(std::int64_t n, F f, const From*... from) {
  constexpr std::int64_t w = lanes<T>;
  constexpr std::int64_t block = 64 * w;
  double total = 0;
  std::int64_t i = 0;
  while (i + w <= n) {
    const std::int64_t end = i + block < n ? i + block : n;
    pack<T> s0{}, s1{}, s2{}, s3{};
    for (; i + 4 * w <= end; i += 4 * w) {
      s0 += f(load(from + i)...);
      s1 += f(load(from + i + w)...);
      s2 += f(load(from + i + 2 * w)...);
      s3 += f(load(from + i + 3 * w)...);
    }
    for (; i + w <= end; i += w) s0 += f(load(from + i)...);
    total += static_cast<double>(lane_sum<T>((s0 + s1) + (s2 + s3)));
  }
  if (i < n) {
    const pack<T> tail = f(load_some(from + i, n - i, 0)...);
    for (std::int64_t lane = 0; lane < n - i; ++lane) total += static_cast<double>(tail[lane]);
  }
  return total;
}

/// Returns the largest of n elements; -infinity if n is 0.
template <class T>
PLAIT_ALWAYS_INLINE arithmetic<T> max_of(const T* x, std::int64_t n) {
  constexpr arithmetic<T> least = -std::numeric_limits<arithmetic<T>>::infinity();
  constexpr std::int64_t w = lanes<T>;
  pack<T> m0 = splat(least), m1 = m0;
  std::int64_t i = 0;
  for (; i + 2 * w <= n; i += 2 * w) {
    m0 = max<T>(m0, load(x + i));
    m1 = max<T>(m1, load(x + i + w));
  }
  if (i + w <= n) {
    m0 = max<T>(m0, load(x + i));
    i += w;
  }
  if (i < n) m1 = max<T>(m1, load_some(x + i, n - i, least));
  return lane_max<T>(max<T>(m0, m1));
}

/// out[c] += sum over r of term(r, c). Each column is summed in T over 32 rows and beyond that in double, tile by tile,
/// so that the sums stay in the cache. `term(r, c)` must be a plain expression of type T that the compiler can
/// vectorise over c.
template <class T, class F>
void add_column_sums(std::int64_t rows, std::int64_t columns, T* out, F term) {
  constexpr std::int64_t tile = 256;
  constexpr std::int64_t block = 32;
  for (std::int64_t c0 = 0; c0 < columns; c0 += tile) {
    const std::int64_t width = columns - c0 < tile ? columns - c0 : tile;
    alignas(64) double total[tile] = {};
    for (std::int64_t r0 = 0; r0 < rows; r0 += block) {
      const std::int64_t r_end = rows - r0 < block ? rows : r0 + block;
      alignas(64) T partial[tile] = {};
      for (std::int64_t r = r0; r < r_end; ++r) {
        PLAIT_IVDEP
        for (std::int64_t c = 0; c < width; ++c) partial[c] += term(r, c0 + c);
      }
      for (std::int64_t c = 0; c < width; ++c) total[c] += static_cast<double>(partial[c]);
    }
    for (std::int64_t c = 0; c < width; ++c) out[c0 + c] = static_cast<T>(static_cast<double>(out[c0 + c]) + total[c]);
  }
}

}  // namespace plait::kernels::simd

#include "plait/core/macros_on.hpp"
