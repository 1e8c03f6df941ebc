// A digest of an array: by it ranks find out whether their values are equal, and how far they differ, without sending
// the values. CPU and GPU make the same one.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/core/dtype.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::kernels {

/// Of n elements x_i: arrays with equal bits have equal digests, and others equal hashes with a probability of 2^-64.
/// `sketch[k]` is the sum of s_k(i) x_i, where s_k(i) is 1 or -1 by the index alone: for two arrays x and y, the
/// expected square of the difference of their sketches is |x - y|^2 (Alon, Matias and Szegedy 1996).
struct value_digest {
  std::uint64_t hash = 0;
  double squares = 0;  ///< the sum of x_i^2
  double sketch[4] = {};
};

namespace detail {

/// The bits of an element, as a number of 64 bits.
template <class T>
PLAIT_HOST_DEVICE inline std::uint64_t bits_of_element(const T& x) {
  if constexpr (sizeof(T) == 8) {
    std::uint64_t bits = 0;
    memcpy(&bits, &x, sizeof bits);
    return bits;
  } else if constexpr (sizeof(T) == 4) {
    std::uint32_t bits = 0;
    memcpy(&bits, &x, sizeof bits);
    return bits;
  } else {
    static_assert(sizeof(T) == 2);
    std::uint16_t bits = 0;
    memcpy(&bits, &x, sizeof bits);
    return bits;
  }
}
/// A number that depends on the index alone.
PLAIT_HOST_DEVICE inline std::uint64_t mixed_index(std::int64_t i) {
  std::uint64_t z = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93ull;
  return z ^ (z >> 32);
}
PLAIT_HOST_DEVICE inline std::uint64_t hash_of_element(std::uint64_t bits, std::uint64_t index) {
  std::uint64_t z = (bits ^ index) * 0xff51afd7ed558ccdull;
  z = (z ^ (z >> 33)) * 0xc4ceb9fe1a85ec53ull;
  return z ^ (z >> 33);
}
/// Adds the element of the (mixed) index to a digest.
PLAIT_HOST_DEVICE inline void add_to_digest(value_digest& sum, std::uint64_t bits, double x, std::uint64_t index) {
  sum.hash += hash_of_element(bits, index);
  sum.squares += x * x;
  for (int k = 0; k < 4; ++k) sum.sketch[k] += index >> k & 1 ? -x : x;
}

}  // namespace detail

/// The digest of n elements in the host's memory.
template <class T>
value_digest digest_of(const T* x, std::int64_t n) {
  value_digest sum;
  for (std::int64_t i = 0; i < n; ++i) {
    double value = 0;
    if constexpr (std::is_same_v<T, bf16>)
      value = static_cast<double>(to_float(x[i]));
    else
      value = static_cast<double>(x[i]);
    detail::add_to_digest(sum, detail::bits_of_element(x[i]), value, detail::mixed_index(i));
  }
  return sum;
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
