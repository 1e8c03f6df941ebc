// The element types of arrays, as values and as C++ types, and `bf16`. Which of them a layer uses for weights,
// gradients and statistics is in core/precision.hpp; the types of files are in checkpoint/safetensors.hpp.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "plait/version.hpp"

namespace plait {

/// Brain floating point: the upper half of an IEEE binary32. Storage only; arithmetic happens in float.
struct bf16 {
  std::uint16_t bits = 0;
};

/// Returns the float that a bf16 stands for.
constexpr float to_float(bf16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }

/// Returns the nearest bf16, ties to even; a NaN stays a (quiet) NaN.
constexpr bf16 to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return bf16{static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded)};
}

enum class dtype : std::uint8_t { f32, f64, bf16, i32, i64, u8 };

/// Size of one element in bytes.
constexpr std::size_t size_of(dtype type) {
  switch (type) {
    case dtype::f32:
      return 4;
    case dtype::f64:
      return 8;
    case dtype::bf16:
      return 2;
    case dtype::i32:
      return 4;
    case dtype::i64:
      return 8;
    case dtype::u8:
      return 1;
  }
  return 0;
}

constexpr const char* name_of(dtype type) {
  switch (type) {
    case dtype::f32:
      return "float";
    case dtype::f64:
      return "double";
    case dtype::bf16:
      return "bf16";
    case dtype::i32:
      return "int32";
    case dtype::i64:
      return "int64";
    case dtype::u8:
      return "uint8";
  }
  return "?";
}

/// The dtype of a C++ element type; an unsupported type has no specialisation.
template <class T>
inline constexpr dtype dtype_of = T::plait_has_no_dtype_for_this_type;
template <>
inline constexpr dtype dtype_of<float> = dtype::f32;
template <>
inline constexpr dtype dtype_of<double> = dtype::f64;
template <>
inline constexpr dtype dtype_of<bf16> = dtype::bf16;
template <>
inline constexpr dtype dtype_of<std::int32_t> = dtype::i32;
template <>
inline constexpr dtype dtype_of<std::int64_t> = dtype::i64;
template <>
inline constexpr dtype dtype_of<std::uint8_t> = dtype::u8;

}  // namespace plait
