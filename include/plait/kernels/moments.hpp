// The moments of an optimizer in memory: in the type of the arithmetic, in bf16, or in 8 bits by blocks; and stochastic
// rounding. Test: tests/unit/kernels/moments.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/types.hpp"
#include "plait/kernels/philox.hpp"

namespace plait::kernels {

/// Returns the bits of a number as another type of its size. Kernels of GPUs cannot call std::bit_cast, and nvcc only
/// warns.
template <class To, class From>
PLAIT_HOST_DEVICE constexpr To bits_as(From x) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, x);
}

// ---- stochastic rounding -----------------------------------------------------------------------------------------
//
// A number is rounded up with the probability of its remainder, so that the mean of rounded numbers is exact. The
// random bits of an element depend only on its place in the whole tensor.

/// The place of an array's elements in its tensor: element i of the array is element `first + i` of the part that `map`
/// describes. `stream` is the tensor's stream of random numbers.
struct rounded_elements {
  run_map map{};
  std::int64_t first = 0;
  std::uint64_t stream = 0;
};

/// Returns the seed for the rounding of a step, by the finalizer of SplitMix64 (Steele, Lea and Flood 2014). So steps
/// share no random numbers with each other or with initial values.
constexpr std::uint64_t rounding_seed_of(std::uint64_t seed, std::uint64_t step) {
  std::uint64_t x = seed + (step + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// Returns the seed for rounding a step's values; `step_seed` itself is for its moments.
PLAIT_HOST_DEVICE constexpr std::uint64_t value_rounding(std::uint64_t step_seed) { return ~step_seed; }

/// Returns one of the two bf16 next to x, chosen by 16 random bits. The probability of the upper one is (x - lower) /
/// (upper - lower), which is exact, because a float has 16 bits more. Numbers that bf16 represents are kept. NaN and
/// infinity are rounded as by `to_bf16`, which no kernel of a GPU may call.
PLAIT_HOST_DEVICE constexpr bf16 to_bf16_stochastically(float x, std::uint32_t random) {
  const auto bits = bits_as<std::uint32_t>(x);
  const bool infinite_or_nan = (bits & 0x7F800000u) == 0x7F800000u, nan = infinite_or_nan && (bits & 0x7FFFFFu) != 0;
  const std::uint32_t rounded = infinite_or_nan ? bits >> 16 | (nan ? 0x40u : 0u) : (bits + (random & 0xFFFFu)) >> 16;
  return bf16{static_cast<std::uint16_t>(rounded)};
}
static_assert(to_bf16_stochastically(bits_as<float>(0x7F800001u), 0).bits == to_bf16(bits_as<float>(0x7F800001u)).bits);
static_assert(to_bf16_stochastically(bits_as<float>(0xFF800000u), 7).bits == to_bf16(bits_as<float>(0xFF800000u)).bits);

// ---- moments -----------------------------------------------------------------------------------------------------

/// The forms in which AdamW stores its two moments of an element. All are computed in the type of the arithmetic.
///
///   full   the type of the arithmetic: float, for doubles double
///   bf16   rounded stochastically: where beta2 is 0.999, a step lowers a second moment by a thousandth at most, and
///          rounding to the nearest of numbers in steps of 1/256 would never change it
///   int8   8 bits, rounded stochastically, and a scale of 8 bits for each block of `moment_block` elements
///
/// Each block has a scale, as in Dettmers et al. 2022 (8-bit optimizers, arXiv 2110.02861). Scales are powers of 2, as
/// in the OCP Microscaling formats (2023), so a new scale does not change the stored numbers. A code is a small
/// floating-point number below the scale. A linear code would round all numbers below 1/254 of a block's largest to
/// zero. AdamW's steps are the quotient of the two moments, so it would then move such elements wrongly.
///
///   first moment    sign, 4 bits of exponent, 3 of mantissa: down to 2^-17 of the scale, and zero
///   second moment   5 bits of exponent, 3 of mantissa: down to 2^-31 of the scale, its root to 2^-15.5, and no zero
///                   (Li et al. 2023, arXiv 2309.01507): smaller ones are raised to that, so that steps are too
///                   small rather than too large
///
/// One rounding has a random error of 0.03 to 0.05 of the number. Over steps these errors add up to about 0.04 / (1 -
/// beta^2)^0.5 of it: 0.09 of first moments at 0.9, 0.13 of second ones at 0.95, 0.9 at 0.999.
enum class moment_type : std::uint8_t { full, bf16, int8 };

constexpr const char* name_of(moment_type type) {
  switch (type) {
    case moment_type::full:
      return "full";
    case moment_type::bf16:
      return "bf16";
    case moment_type::int8:
      return "int8";
  }
  return "?";
}

/// The number of elements that share a scale, for moments in 8 bits.
inline constexpr std::int64_t moment_block = 256;

/// The positions of two moments of `size` elements in one piece of memory, in bytes: first moments, second moments,
/// then the scales of each, if any. `begin` is the index of the first element in its block.
struct moment_places {
  std::size_t second = 0, first_scales = 0, second_scales = 0, bytes = 0;
};
constexpr moment_places places_of(moment_type type, std::size_t full_element, std::int64_t size, std::int64_t begin) {
  const std::size_t element = type == moment_type::full ? full_element : type == moment_type::bf16 ? 2 : 1;
  const auto n = static_cast<std::size_t>(size) * element;
  if (type != moment_type::int8) return {n, 0, 0, 2 * n};
  const auto blocks = static_cast<std::size_t>((size + begin + moment_block - 1) / moment_block);
  return {n, 2 * n, 2 * n + blocks, 2 * n + 2 * blocks};
}

/// Returns the scale of a block whose largest magnitude is `most`: its exponent as in a float, plus one unless `most`
/// is a power of 2. A block whose `most` is below 2^-95 counts as zero, with scale 0.
PLAIT_HOST_DEVICE constexpr std::uint8_t moment_scale(float most) {
  const std::uint32_t exponent = (bits_as<std::uint32_t>(most) + 0xFFFFFu) >> 23;
  return exponent < 32 ? std::uint8_t{0} : static_cast<std::uint8_t>(exponent);
}

/// Returns the code of a first moment in a block of this scale; 16 random bits choose between its two neighbours.
PLAIT_HOST_DEVICE constexpr std::uint8_t first_moment_code(float x, std::uint8_t scale, std::uint32_t random) {
  const auto bits = bits_as<std::uint32_t>(x);
  const std::uint32_t sign = bits >> 24 & 0x80u, size = bits & 0x7FFFFFFFu;
  const std::uint32_t r = random & 0xFFFFu;
  const std::int32_t upper = static_cast<std::int32_t>((size + (r << 4 | 8u)) >> 20) - (scale - 15) * 8;
  // Below the smallest exponent, codes are multiples of 2^-17 of the scale.
  const float steps = bits_as<float>(size) * bits_as<float>((271u - scale) << 23);
  const bool small = static_cast<std::int32_t>(size >> 23) < scale - 14;
  const auto lower = static_cast<std::int32_t>((small ? steps : 0.0f) + (static_cast<float>(r) + 0.5f) * 0x1p-16f);
  return static_cast<std::uint8_t>(scale == 0 ? 0u : sign | static_cast<std::uint32_t>(small ? lower : upper));
}
PLAIT_HOST_DEVICE constexpr float first_moment(std::uint8_t code, std::uint8_t scale) {
  const std::int32_t size = code & 0x7F;
  const float steps = static_cast<float>(size) * bits_as<float>(static_cast<std::uint32_t>(scale - 17) << 23);
  const float value = size < 8 ? steps : bits_as<float>(static_cast<std::uint32_t>(size + (scale - 15) * 8) << 20);
  return scale == 0 ? 0.0f : code & 0x80 ? -value : value;
}

/// Returns the code of a second moment in a block of this scale; 16 random bits choose between its two neighbours.
PLAIT_HOST_DEVICE constexpr std::uint8_t second_moment_code(float x, std::uint8_t scale, std::uint32_t random) {
  const std::uint32_t bits = bits_as<std::uint32_t>(x) + ((random & 0xFFFFu) << 4 | 8u);
  const std::int32_t code = static_cast<std::int32_t>(bits >> 20) - (scale - 31) * 8;
  return static_cast<std::uint8_t>(scale == 0 || code < 0 ? 0 : code);
}
PLAIT_HOST_DEVICE constexpr float second_moment(std::uint8_t code, std::uint8_t scale) {
  return scale == 0 ? 0.0f : bits_as<float>(static_cast<std::uint32_t>(code + (scale - 31) * 8) << 20);
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
