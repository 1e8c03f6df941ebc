// A sum of squares as integers, which is exact, and so the same in whatever order and on however many ranks it is made.
// It is slower than a sum of floats, and for canonical numerics.
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

/// A number as three digits, which belong to the words from `first` on.
struct parts_of_number {
  int first = 0;
  std::int64_t digit[digits] = {};
  bool finite = true;
};
/// Splits x >= 0 into three digits of 20 bits, and the index of the first.
PLAIT_HOST_DEVICE inline parts_of_number split(double x) {
  std::uint64_t bits = 0;
  memcpy(&bits, &x, sizeof bits);  // no std::bit_cast in kernels
  const auto exponent = static_cast<int>(bits >> 52 & 2047);
  parts_of_number parts;
  parts.finite = exponent != 2047;
  if (!parts.finite) return parts;
  std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | (exponent == 0 ? 0 : std::uint64_t{1} << 52);
  mantissa <<= exponent == 0 ? 1 : exponent % exponents;  // subnormal numbers have the exponent 1
  constexpr std::uint64_t mask = (std::uint64_t{1} << digit_bits) - 1;
  parts.first = exponent / exponents * digits;
  for (int d = 0; d < digits; ++d)
    parts.digit[d] =
        static_cast<std::int64_t>(d + 1 < digits ? mantissa >> d * digit_bits & mask : mantissa >> d * digit_bits);
  return parts;
}
inline void add(std::int64_t* sum, double x) {
  const parts_of_number parts = split(x);
  if (!parts.finite) ++sum[bins * digits];
  for (int d = 0; d < digits; ++d) sum[parts.first + d] += parts.digit[d];
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
