// Sums on the CPU into numbers in the device's memory, and numbers computed from such sums. No function returns a value
// to the host, so devices need not wait. Sums over ranks are collectives.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/sums.hpp"

namespace plait::kernels {

/// *out = the sum of n elements.
template <class S>
void sum(cpu&, const S* x, std::int64_t n, double* out) {
  *out = simd::sum_of<S>(
      n, [](simd::pack<S> v) { return v; }, x);
}

/// *out = the sum of n elements, each rounded to a multiple of `quantum`, a power of 2. It is exact below 2^53 quanta,
/// and so it does not depend on the order.
template <class S>
void sum_of_multiples(cpu&, const S* x, std::int64_t n, double quantum, double* out) {
  double total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += std::nearbyint(static_cast<double>(x[i]) / quantum) * quantum;
  *out = total;
}

namespace detail {

/// Adds the squares of n elements to bins. Lanes sum squares of the five largest bins in registers; squares for smaller
/// bins are added one by one.
template <class G>
void add_block_of_squares(const G* x, std::int64_t n, std::int64_t* bins) {
  namespace exact = exact_squares;
  constexpr int width = 8, window = 5;
  using given = typename simd::pack_of<G, width* static_cast<int>(sizeof(G))>::type;
  using doubles = typename simd::pack_of<double, width * 8>::type;
  using words = typename simd::pack_of<std::int64_t, width * 8>::type;
  // `bits` is a reference because the way to return a vector depends on the target processor.
  const auto take_squares = [&](std::int64_t i, words& bits) {
    given from;
    std::memcpy(&from, x + i, sizeof from);
    const doubles v = __builtin_convertvector(from, doubles), square = v * v;
    std::memcpy(&bits, &square, sizeof bits);
  };
  constexpr std::int64_t fraction = (std::int64_t{1} << 52) - 1, digit = (std::int64_t{1} << exact::digit_bits) - 1;
  const std::int64_t whole = n / width * width;
  words largest{};
  for (std::int64_t i = 0; i < whole; i += width) {
    words bits;
    take_squares(i, bits);
    const words exponent = bits >> 52;  // squares have no sign
    largest = exponent > largest ? exponent : largest;
  }
  std::int64_t top = 0;
  for (int lane = 0; lane < width; ++lane) top = std::max<std::int64_t>(top, largest[lane]);
  const std::int64_t first = std::max<std::int64_t>((top >> exact::exponent_bits) - window + 1, 0);
  const bool finite = top != 2047;
  words sums[window][exact::digits] = {}, outside{};
  for (std::int64_t i = 0; finite && i < whole; i += width) {
    words bits;
    take_squares(i, bits);
    const words exponent = bits >> 52, bin = (exponent >> exact::exponent_bits) - first;
    outside |= (bin < 0) & bits;
    const words normal = exponent != 0;  // all bits of a lane
    const words mantissa = ((bits & fraction) | (normal & (std::int64_t{1} << 52)))
                           << ((normal & exponent & (exact::exponents - 1)) | (~normal & 1));
    const words parts[] = {mantissa & digit, mantissa >> exact::digit_bits & digit, mantissa >> 2 * exact::digit_bits};
    for (int w = 0; w < window; ++w) {
      const words here = bin == w;
      for (int d = 0; d < exact::digits; ++d) sums[w][d] += parts[d] & here;
    }
  }
  for (int w = 0; w < window; ++w)
    for (int d = 0; d < exact::digits; ++d)
      for (int lane = 0; lane < width; ++lane)
        if (sums[w][d][lane] != 0) bins[(first + w) * exact::digits + d] += sums[w][d][lane];
  std::int64_t others = finite ? 0 : 1;
  for (int lane = 0; lane < width; ++lane) others |= outside[lane];
  for (std::int64_t i = 0; others != 0 && i < whole; ++i) {
    const auto value = static_cast<double>(x[i]);
    std::int64_t bits = 0;
    const double square = value * value;
    std::memcpy(&bits, &square, sizeof bits);
    if (!finite || bits >> 52 >> exact::exponent_bits < first) exact::add(bins, square);
  }
  for (std::int64_t i = whole; i < n; ++i) {
    const auto value = static_cast<double>(x[i]);
    exact::add(bins, value * value);
  }
}

}  // namespace detail

/// Adds the squares of all elements of all parts to `bins`, exactly. Each square, rounded to double, is added as an
/// integer to the three digits of its exponent's bin (kernels/sums.hpp).
template <class G>
void add_exact_squares(cpu&, std::span<const const_elements<G>> parts, std::int64_t* bins) {
  constexpr std::int64_t block = 2048;
  for (const const_elements<G>& part : parts)
    for (std::int64_t at = 0; at < part.size; at += block) {
      const std::int64_t n = std::min(block, part.size - at);
      if constexpr (std::is_same_v<G, bf16>) {
        float wide[block];
        for (std::int64_t i = 0; i < n; ++i) wide[i] = widened(part.data[at + i]);
        detail::add_block_of_squares(wide, n, bins);
      } else {
        detail::add_block_of_squares(part.data + at, n, bins);
      }
    }
}
/// *out = the sum of the bins.
inline void sum_of_bins(cpu&, const std::int64_t* bins, double* out) { *out = exact_squares::total(bins); }

/// *out += the sum of the squares of all elements of all parts.
template <class G>
void add_sum_squares(cpu&, std::span<const const_elements<G>> parts, double* out) {
  for (const const_elements<G>& part : parts) {
    *out += simd::sum_of<G>(
        part.size, [](simd::pack<G> v) { return v * v; }, part.data);
  }
}

/// *y = 1 / *x where *x > 0, else 0.
inline void reciprocal(cpu&, const double* x, double* y) { *y = *x > 0 ? 1 / *x : 0.0; }

/// y[i] = *value, rounded to T.
template <class T>
void fill_from(cpu& device, T* y, std::int64_t n, const double* value) {
  fill(device, y, n, *value);
}

/// norm = sqrt(*squares), factor = `clip_factor` of it, update = 1. If the norm is not finite, update and factor are 0,
/// skips increases by one, and the step must be skipped.
inline void clip(cpu&, const double* squares, double limit, clip_numbers* out) {
  out->norm = std::sqrt(*squares);
  out->update = std::isfinite(out->norm) ? 1.0 : 0.0;
  out->factor = out->update == 0 ? 0.0 : clip_factor(out->norm, limit);
  out->skips += 1 - out->update;
}

PLAIT_COMPILED_TEMPLATE(void sum(cpu&, const float*, std::int64_t, double*))
PLAIT_COMPILED_TEMPLATE(void sum(cpu&, const double*, std::int64_t, double*))
PLAIT_COMPILED_TEMPLATE(void add_exact_squares(cpu&, std::span<const const_elements<float>>, std::int64_t*))
PLAIT_COMPILED_TEMPLATE(void add_exact_squares(cpu&, std::span<const const_elements<bf16>>, std::int64_t*))
PLAIT_COMPILED_TEMPLATE(void add_exact_squares(cpu&, std::span<const const_elements<double>>, std::int64_t*))
PLAIT_COMPILED_TEMPLATE(void add_sum_squares(cpu&, std::span<const const_elements<float>>, double*))
PLAIT_COMPILED_TEMPLATE(void add_sum_squares(cpu&, std::span<const const_elements<bf16>>, double*))
PLAIT_COMPILED_TEMPLATE(void add_sum_squares(cpu&, std::span<const const_elements<double>>, double*))

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
