// A stand-in for CUDA's header of bf16: the type and its conversions, without arithmetic.
#pragma once

#include <bit>
#include <cstdint>

struct alignas(2) __nv_bfloat16 {
  std::uint16_t bits;
};

/// Rounds to the nearest value, ties to even.
inline __nv_bfloat16 __float2bfloat16(float x) {
  const auto all = std::bit_cast<std::uint32_t>(x);
  if ((all & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<std::uint16_t>((all + 0x7fffu + ((all >> 16) & 1u)) >> 16)};
}
