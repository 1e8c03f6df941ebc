// Data types and formulas for the reductions on all devices: arrays of a sum over many tensors, the numbers of
// clipping, exact sums of squares, and digests. kernels/cpu/reductions.hpp and kernels/cuda/reductions.hpp have the
// kernels.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"

namespace plait::kernels {

/// `size` elements in a device's memory that a kernel reads: one tensor of a launch over many.
template <class G>
struct const_elements {
  const G* data = nullptr;
  std::int64_t size = 0;
};

/// The numbers that `clip` computes from the gradients of a step, in a device's memory.
struct clip_numbers {
  double norm = 0;
  double factor = 0;  ///< factor for the gradients
  double update = 0;  ///< 1; 0 if the norm is not finite
  double skips = 0;   ///< number of steps with a norm that was not finite
};

/// Returns the factor that clips gradients with a finite norm to `limit`, as in PyTorch's clip_grad_norm_: limit /
/// (norm + 1e-6), at most 1. A limit of 0 does not clip.
PLAIT_HOST_DEVICE inline double clip_factor(double norm, double limit) {
  const double ratio = limit / (norm + 1e-6);
  return limit > 0 && ratio < 1 ? ratio : 1.0;
}

}  // namespace plait::kernels

namespace plait::kernels::exact_squares {

// A sum of squares as integers. It is exact, so no order and no number of ranks changes it, but it is slower than a sum
// of floats.

/// A bin adds numbers of eight neighbouring exponents, as three digits of 20 bits each in words of 64 bits. So 2^43
/// numbers can be added to one bin without overflow. A separate word counts numbers that are not finite.
inline constexpr int digits = 3, digit_bits = 20, exponent_bits = 3, exponents = 1 << exponent_bits;
inline constexpr int bins = 2048 / exponents;
inline constexpr int words = bins * digits + 1;  ///< the last word counts numbers that are not finite

/// A number as three digits, for the words from `first` on.
struct parts_of_number {
  int first = 0;
  std::int64_t digit[digits] = {};
  bool finite = true;
};
/// Splits x >= 0 into three digits of 20 bits, and the index of the first word.
PLAIT_HOST_DEVICE inline parts_of_number split(double x) {
  std::uint64_t bits = 0;
  memcpy(&bits, &x, sizeof bits);  // kernels have no std::bit_cast
  const auto exponent = static_cast<int>(bits >> 52 & 2047);
  parts_of_number parts;
  parts.finite = exponent != 2047;
  if (!parts.finite) return parts;
  std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | (exponent == 0 ? 0 : std::uint64_t{1} << 52);
  mantissa <<= exponent == 0 ? 1 : exponent % exponents;  // exponent field 0 (subnormal numbers) stands for exponent 1
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

/// Returns the sum, added from the smallest bin to the largest; NaN if a number was not finite. Its bits depend only on
/// the integers.
PLAIT_HOST_DEVICE inline double total(const std::int64_t* sum) {
  if (sum[bins * digits] != 0) return NAN;
  double all = 0;
  for (int b = 0; b < bins; ++b)
    for (int d = 0; d < digits; ++d)
      all += ldexp(static_cast<double>(sum[b * digits + d]), b * exponents + d * digit_bits - 1075);
  return all;
}

}  // namespace plait::kernels::exact_squares

namespace plait::kernels {

// A digest of an array. Ranks compare digests instead of sending their values. CPU and GPU compute equal digests.

inline constexpr int digest_sketches = 4;

/// The digest of n elements x_i. Equal bits give equal digests; different bits give equal hashes with a probability of
/// 2^-64. `sketch[k]` is the sum of s_k(i) x_i, where s_k(i) is 1 or -1 and depends only on the index. For two arrays x
/// and y, the expected squared difference of their sketches is |x - y|^2 (Alon, Matias and Szegedy 1996).
struct value_digest {
  std::uint64_t hash = 0;  ///< the sum of hashes of the array's 8-byte words
  double squares = 0;      ///< the sum of x_i^2
  double sketch[digest_sketches] = {};
};

namespace detail {

/// The number of elements per word.
template <class T>
inline constexpr int elements_of_word = 8 / static_cast<int>(sizeof(T));

/// Returns a number that depends only on the index of a word. Bit 4 j + k is the sign of the word's element j in sketch
/// k.
PLAIT_HOST_DEVICE inline std::uint64_t mixed_index(std::int64_t word) {
  std::uint64_t z = static_cast<std::uint64_t>(word) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93ull;
  return z ^ (z >> 32);
}
PLAIT_HOST_DEVICE inline std::uint64_t hash_of_word(std::uint64_t bits, std::uint64_t index) {
  std::uint64_t z = (bits ^ index) * 0xff51afd7ed558ccdull;
  z = (z ^ (z >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return z ^ (z >> 33);
}
/// Returns the word of `count` elements, filled up with 0.
template <class T>
PLAIT_HOST_DEVICE inline std::uint64_t word_of(const T* x, std::int64_t count) {
  std::uint64_t word = 0;
  memcpy(&word, x, static_cast<std::size_t>(count) * sizeof(T));
  return word;
}

}  // namespace detail

/// Returns the digest of n elements in host memory.
template <class T>
value_digest digest_of(const T* x, std::int64_t n) {
  using doubles = double __attribute__((vector_size(digest_sketches * sizeof(double))));
  using words = std::uint64_t __attribute__((vector_size(digest_sketches * sizeof(double))));
  constexpr std::uint64_t minus = std::uint64_t{1} << 63;
  static constexpr auto signs = [] {
    std::array<std::array<std::uint64_t, digest_sketches>, 16> masks{};
    for (std::uint64_t bits = 0; bits < 16; ++bits)
      for (std::uint64_t k = 0; k < digest_sketches; ++k) masks[bits][k] = bits >> k & 1 ? minus : 0;
    return masks;
  }();
  constexpr int elements = detail::elements_of_word<T>;
  value_digest sum;
  double squares[8 / sizeof(T)] = {};
  doubles sketches[8 / sizeof(T)] = {};
  const auto add = [&](const T* from, std::int64_t word, std::int64_t count) {
    const std::uint64_t index = detail::mixed_index(word);
    sum.hash += detail::hash_of_word(detail::word_of(from, count), index);
    for (std::int64_t j = 0; j < count; ++j) {
      const auto value = static_cast<double>(widened(from[j]));
      squares[j] += value * value;
      words sign;
      std::memcpy(&sign, signs[index >> digest_sketches * j & 15].data(), sizeof sign);
      sketches[j] += doubles(words(value - doubles{}) ^ sign);
    }
  };
  const std::int64_t whole = n / elements;
  for (std::int64_t w = 0; w < whole; ++w) add(x + w * elements, w, elements);
  if (n % elements != 0) add(x + whole * elements, whole, n % elements);
  for (int j = 0; j < elements; ++j) {
    sum.squares += squares[j];
    for (int k = 0; k < digest_sketches; ++k) sum.sketch[k] += sketches[j][k];
  }
  return sum;
}
PLAIT_COMPILED_TEMPLATE(value_digest digest_of(const float*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(value_digest digest_of(const bf16*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(value_digest digest_of(const double*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(value_digest digest_of(const std::int32_t*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(value_digest digest_of(const std::int64_t*, std::int64_t))

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
