// A digest of an array: by it ranks find out whether their values are equal, and how far they differ, without sending
// the values. CPU and GPU make the same one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"

namespace plait::kernels {

inline constexpr int digest_sketches = 4;

/// Of n elements x_i: arrays with equal bits have equal digests, and others equal hashes with a probability of 2^-64.
/// `sketch[k]` is the sum of s_k(i) x_i, where s_k(i) is 1 or -1 by the index alone: for two arrays x and y, the
/// expected square of the difference of their sketches is |x - y|^2 (Alon, Matias and Szegedy 1996).
struct value_digest {
  std::uint64_t hash = 0;  ///< the sum of the hashes of the array's words of 8 bytes
  double squares = 0;      ///< the sum of x_i^2
  double sketch[digest_sketches] = {};
};

namespace detail {

/// The elements of a word.
template <class T>
inline constexpr int elements_of_word = 8 / static_cast<int>(sizeof(T));

/// A number that depends on the index of a word alone: of element j in the word, bit 4 j + k is the sign in sketch k.
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
/// The word of `count` elements, the others 0.
template <class T>
PLAIT_HOST_DEVICE inline std::uint64_t word_of(const T* x, std::int64_t count) {
  std::uint64_t word = 0;
  memcpy(&word, x, static_cast<std::size_t>(count) * sizeof(T));
  return word;
}

}  // namespace detail

/// The digest of n elements in the host's memory.
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
