#pragma once

#include <cstddef>
#include <cstdint>

#include "plait/version.hpp"

namespace plait {

/// Brain floating point: the upper half of an IEEE binary32. Storage only; arithmetic happens in float.
struct bf16 {
  std::uint16_t bits = 0;
};

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
