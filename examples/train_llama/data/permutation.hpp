// A shuffled order of [0, size) that is computed and not stored. It is no generator of random numbers: weights and
// dropout have theirs in kernels/philox.hpp.
#pragma once

#include <bit>
#include <cstdint>

#include "plait/version.hpp"

namespace plait {

/// A pseudo-random permutation of [0, size) that can be evaluated at any place in constant time and memory: a balanced
/// Feistel network on the smallest even number of bits that holds `size`, walked until the image falls into range
/// (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The domain is at most four times `size`, so
/// the expected walk is at most four steps.
///
/// A shuffled array would have to be stored, and made anew by every rank and after every restart; this is a function of
/// (key, index) alone.
class permutation {
 public:
  /// `size` >= 1. Different pairs (`seed`, `stream`) give unrelated permutations.
  constexpr permutation(std::int64_t size, std::uint64_t seed, std::uint64_t stream)
      : size_(static_cast<std::uint64_t>(size)), key_(mix(mix(seed) ^ (stream + golden))) {
    const int bits = size_ <= 1 ? 0 : static_cast<int>(std::bit_width(size_ - 1));
    half_bits_ = bits == 0 ? 1 : (bits + 1) / 2;
    mask_ = (std::uint64_t{1} << half_bits_) - 1;
  }

  constexpr std::int64_t size() const { return static_cast<std::int64_t>(size_); }

  /// The image of `index`, for 0 <= index < size().
  constexpr std::int64_t operator()(std::int64_t index) const {
    auto value = static_cast<std::uint64_t>(index);
    do {
      value = encrypt(value);
    } while (value >= size_);
    return static_cast<std::int64_t>(value);
  }

 private:
  static constexpr std::uint64_t golden = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio
  static constexpr int rounds = 8;

  /// The output function of SplitMix64 (Steele, Lea and Flood, 2014): a bijection with full avalanche.
  static constexpr std::uint64_t mix(std::uint64_t x) {
    x += golden;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  constexpr std::uint64_t encrypt(std::uint64_t value) const {
    std::uint64_t left = value >> half_bits_;
    std::uint64_t right = value & mask_;
    for (std::uint64_t round = 0; round < rounds; ++round) {
      const std::uint64_t next = left ^ (mix(key_ ^ mix(right + (round << 56))) & mask_);
      left = right;
      right = next;
    }
    return (left << half_bits_) | right;
  }

  std::uint64_t size_;
  std::uint64_t key_;
  std::uint64_t mask_ = 0;
  int half_bits_ = 1;
};

}  // namespace plait
