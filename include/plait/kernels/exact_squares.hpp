// A sum of squares as integers, which is exact, and so the same in whatever order and on however many ranks it is made.
// It is slower than a sum of floats, and for canonical numerics. Next: train/optim/gradient_norm.hpp,
// tests/unit/kernels/exact_squares.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "plait/core/compiled.hpp"

namespace plait::kernels::exact_squares {

/// A bin holds numbers of eight neighbouring exponents as three digits of 20 bits each (and what carries they have), so
/// that 2^43 numbers can be added to one. What is not finite is counted apart.
inline constexpr int digits = 3, digit_bits = 20, exponent_bits = 3, exponents = 1 << exponent_bits;
inline constexpr int bins = 2048 / exponents;
inline constexpr int words = bins * digits + 1;  ///< the last counts what is not finite

/// Calls add(word, value) for the words that a number, which is not negative, adds to.
template <class Add>
PLAIT_HOST_DEVICE inline void each_word(double x, Add add) {
  std::uint64_t bits = 0;
  memcpy(&bits, &x, sizeof bits);  // no std::bit_cast in kernels
  const auto exponent = static_cast<int>(bits >> 52 & 2047);
  if (exponent == 2047) return add(bins * digits, std::int64_t{1});
  std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | (exponent == 0 ? 0 : std::uint64_t{1} << 52);
  mantissa <<= exponent == 0 ? 1 : exponent % exponents;  // subnormal numbers have the exponent 1
  const int bin = exponent / exponents * digits;
  constexpr std::uint64_t mask = (std::uint64_t{1} << digit_bits) - 1;
  add(bin, static_cast<std::int64_t>(mantissa & mask));
  add(bin + 1, static_cast<std::int64_t>(mantissa >> digit_bits & mask));
  add(bin + 2, static_cast<std::int64_t>(mantissa >> 2 * digit_bits));
}
inline void add(std::int64_t* sum, double x) {
  each_word(x, [sum](int word, std::int64_t value) { sum[word] += value; });
}

/// Returns the sum, from the smallest bin to the largest; NaN where something was not finite. Its bits depend on the
/// integers alone.
PLAIT_HOST_DEVICE inline double total(const std::int64_t* sum) {
  if (sum[bins * digits] != 0) return NAN;
  double all = 0;
  for (int b = 0; b < bins; ++b)
    for (int d = 0; d < digits; ++d)
      all += ldexp(static_cast<double>(sum[b * digits + d]), b * exponents + d * digit_bits - 1075);
  return all;
}

}  // namespace plait::kernels::exact_squares
