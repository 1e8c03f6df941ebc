// Counter-based random numbers: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1,
// 2, 3" (SC 2011). A number depends only on (seed, stream, index), so any rank can compute any element's number.
// kernels/cpu/random.hpp and kernels/cuda/random.hpp fill tensors. Test: tests/unit/kernels/random.cpp.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <string>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::kernels {

inline constexpr std::uint32_t philox_multiplier_0 = 0xD2511F53u;
inline constexpr std::uint32_t philox_multiplier_1 = 0xCD9E8D57u;
inline constexpr std::uint32_t philox_weyl_0 = 0x9E3779B9u;
inline constexpr std::uint32_t philox_weyl_1 = 0xBB67AE85u;

/// Four random words, the output for one value of Philox's counter.
struct four_words {
  std::uint32_t word[4];

  PLAIT_HOST_DEVICE constexpr std::uint32_t operator[](std::size_t i) const { return word[i]; }
  friend constexpr bool operator==(const four_words&, const four_words&) = default;
};

/// Returns four random words for a 128-bit counter, whose words are c, and a 64-bit key.
PLAIT_HOST_DEVICE constexpr four_words philox4x32(four_words c, std::uint32_t key_0, std::uint32_t key_1) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{philox_multiplier_0} * c[0];
    const std::uint64_t p1 = std::uint64_t{philox_multiplier_1} * c[2];
    c = {{static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ key_0, static_cast<std::uint32_t>(p1),
          static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ key_1, static_cast<std::uint32_t>(p0)}};
    key_0 += philox_weyl_0;
    key_1 += philox_weyl_1;
  }
  return c;
}

/// Returns the four words of elements 4 * block to 4 * block + 3 of a stream.
PLAIT_HOST_DEVICE constexpr four_words random_words(std::uint64_t seed, std::uint64_t stream, std::uint64_t block) {
  return philox4x32({{static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                      static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32)}},
                    static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
}

/// Returns a word as a number strictly between 0 and 1.
PLAIT_HOST_DEVICE constexpr double to_unit(std::uint32_t word) { return (static_cast<double>(word) + 0.5) * 0x1p-32; }

/// Returns a number that is uniform in (0, 1).
constexpr double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return to_unit(random_words(seed, stream, index / 4)[index % 4]);
}

/// Returns two independent standard normal numbers from two words (Box and Muller 1958).
inline std::array<double, 2> normal_pair(std::uint32_t a, std::uint32_t b) {
  const double radius = std::sqrt(-2.0 * std::log(to_unit(a)));
  const double angle = 2.0 * std::numbers::pi * to_unit(b);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

/// Returns a standard normal number.
inline double normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const auto words = random_words(seed, stream, index / 4);
  const std::size_t pair = index % 4 / 2 * 2;
  return normal_pair(words[pair], words[pair + 1])[index % 2];
}

/// Throws `plait::error` unless 0 <= p < 1.
inline void check_dropout(double p) {
  if (!(p >= 0.0 && p < 1.0)) fail({"dropout: p = ", p, ", must be at least 0 and below 1"});
}

/// A box as runs of elements that are contiguous in the local and in the global order. It gives an element's global
/// index, which keys its random numbers. Run r begins at local index r * length, and at global index base + sum over d
/// of (index d of r) * stride[d].
struct run_map {
  std::int64_t length = 0;
  std::int64_t runs = 0;
  std::int64_t base = 0;
  int dims = 0;
  std::int64_t extent[max_dims] = {};
  std::int64_t stride[max_dims] = {};

  static constexpr run_map of(const box& part) {
    run_map map;
    map.runs = map.length = 1;
    std::int64_t stride = 1;  // global elements from one index of a dim to the next
    bool contiguous = true;   // whether all further inner dims are whole
    for (int d = part.dims - 1; d >= 0; --d) {
      map.base += part.offset[d] * stride;
      if (contiguous) {
        map.length *= part.local[d];
        contiguous = part.local[d] == part.global[d];
      } else if (part.local[d] != 1) {
        map.runs *= part.local[d];
        map.stride[map.dims] = stride;
        map.extent[map.dims++] = part.local[d];
      }
      stride *= part.global[d];
    }
    return map;
  }

  /// Returns the global index of the start of a run. The arrays list innermost dims first.
  PLAIT_HOST_DEVICE constexpr std::int64_t global_of(std::int64_t run) const {
    std::int64_t at = base;
    for (int d = 0; d < dims; ++d) {
      const std::int64_t outer = run / extent[d];
      at += (run - outer * extent[d]) * stride[d];
      run = outer;
    }
    return at;
  }
  /// Returns the global index of a local element.
  PLAIT_HOST_DEVICE constexpr std::int64_t global_of_element(std::int64_t local) const {
    if (runs == 1) return base + local;
    const std::int64_t run = local / length;
    return global_of(run) + (local - run * length);
  }
};

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
