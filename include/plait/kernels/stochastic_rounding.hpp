// Stochastic rounding: up with the probability of the remainder, so that the mean of what is rounded is exact. The
// random bits of an element depend on its place in the whole tensor alone.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/dtype.hpp"
#include "plait/kernels/bits.hpp"
#include "plait/kernels/run_map.hpp"

namespace plait::kernels {

/// Which elements of which tensor an array holds: element i of the array is element `first + i` of the part that `map`
/// describes. `stream` is the tensor's.
struct rounded_elements {
  run_map map{};
  std::int64_t first = 0;
  std::uint64_t stream = 0;
};

/// Returns the seed of a step's roundings, by the finalizer of SplitMix64 (Steele, Lea and Flood 2014), so that steps
/// share no random numbers with each other nor with initial values.
constexpr std::uint64_t rounding_seed_of(std::uint64_t seed, std::uint64_t step) {
  std::uint64_t x = seed + (step + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

/// The seed for a step's values, where that of the step is for moments.
PLAIT_HOST_DEVICE constexpr std::uint64_t value_rounding(std::uint64_t step_seed) { return ~step_seed; }

/// Returns one of the two bf16 next to x, by 16 random bits: the upper one with a probability of the distance from the
/// lower one over their distance, which is exact, as a float has 16 bits more. What bf16 has stays; NaN and infinity
/// are rounded as by `to_bf16`, which no kernel of a GPU may call.
PLAIT_HOST_DEVICE constexpr bf16 to_bf16_stochastically(float x, std::uint32_t random) {
  const auto bits = bits_as<std::uint32_t>(x);
  const bool infinite_or_nan = (bits & 0x7F800000u) == 0x7F800000u, nan = infinite_or_nan && (bits & 0x7FFFFFu) != 0;
  const std::uint32_t rounded = infinite_or_nan ? bits >> 16 | (nan ? 0x40u : 0u) : (bits + (random & 0xFFFFu)) >> 16;
  return bf16{static_cast<std::uint16_t>(rounded)};
}
static_assert(to_bf16_stochastically(bits_as<float>(0x7F800001u), 0).bits == to_bf16(bits_as<float>(0x7F800001u)).bits);
static_assert(to_bf16_stochastically(bits_as<float>(0xFF800000u), 7).bits == to_bf16(bits_as<float>(0xFF800000u)).bits);

}  // namespace plait::kernels
