// A sum of squares as integers, which is exact, and so the same in whatever order and on however many ranks it is made.
// It is slower than a sum of floats, and for canonical numerics. Next: train/optim/gradient_norm.hpp,
// tests/unit/kernels/exact_squares.cpp.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "plait/core/compiled.hpp"

namespace plait::kernels::exact_squares {

/// A bin holds numbers of eight neighbouring exponents as three digits of 20 bits each (and what carries they have), so
/// that 2^43 numbers can be added to one. What is not finite is counted apart.
inline constexpr int digits = 3, digit_bits = 20, exponents = 8;
inline constexpr int bins = 2048 / exponents;
inline constexpr int words = bins * digits + 1;  ///< the last counts what is not finite

/// Adds a number, which is not negative.
PLAIT_HOST_DEVICE inline void add(std::int64_t* sum, double x) {
  const auto bits = std::bit_cast<std::uint64_t>(x);
  const auto exponent = static_cast<int>(bits >> 52 & 2047);
  if (exponent == 2047) {
    ++sum[bins * digits];
    return;
  }
  std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | (exponent == 0 ? 0 : std::uint64_t{1} << 52);
  mantissa <<= exponent % exponents;
  std::int64_t* const bin = sum + exponent / exponents * digits;
  constexpr std::uint64_t mask = (std::uint64_t{1} << digit_bits) - 1;
  bin[0] += static_cast<std::int64_t>(mantissa & mask);
  bin[1] += static_cast<std::int64_t>(mantissa >> digit_bits & mask);
  bin[2] += static_cast<std::int64_t>(mantissa >> 2 * digit_bits);
}

/// Returns the sum, from the smallest bin to the largest; NaN where something was not finite. Its bits depend on the
/// integers alone.
inline double total(const std::int64_t* sum) {
  if (sum[bins * digits] != 0) return std::nan("");
  double all = 0;
  for (int b = 0; b < bins; ++b)
    for (int d = 0; d < digits; ++d)
      all += std::ldexp(static_cast<double>(sum[b * digits + d]), b * exponents + d * digit_bits - 1075);
  return all;
}

}  // namespace plait::kernels::exact_squares
