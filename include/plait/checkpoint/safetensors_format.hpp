// The part of the safetensors format that reading and writing share: element types, entries, conversions.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/dtype.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"

namespace plait {

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian and are used in place");

/// The element types of the safetensors format that plait reads and writes.
enum class safetensors_dtype : std::uint8_t { boolean, u8, i8, i16, u16, f16, bf16, i32, u32, f32, i64, u64, f64 };

namespace detail {

struct safetensors_dtype_row {
  safetensors_dtype type;
  std::string_view name;
  std::uint64_t size;
};
inline constexpr std::array<safetensors_dtype_row, 13> safetensors_dtypes{{{safetensors_dtype::boolean, "BOOL", 1},
                                                                           {safetensors_dtype::u8, "U8", 1},
                                                                           {safetensors_dtype::i8, "I8", 1},
                                                                           {safetensors_dtype::i16, "I16", 2},
                                                                           {safetensors_dtype::u16, "U16", 2},
                                                                           {safetensors_dtype::f16, "F16", 2},
                                                                           {safetensors_dtype::bf16, "BF16", 2},
                                                                           {safetensors_dtype::i32, "I32", 4},
                                                                           {safetensors_dtype::u32, "U32", 4},
                                                                           {safetensors_dtype::f32, "F32", 4},
                                                                           {safetensors_dtype::i64, "I64", 8},
                                                                           {safetensors_dtype::u64, "U64", 8},
                                                                           {safetensors_dtype::f64, "F64", 8}}};

}  // namespace detail

constexpr std::string_view name_of(safetensors_dtype type) {
  return detail::safetensors_dtypes[static_cast<std::size_t>(type)].name;
}
/// Bytes of one element.
constexpr std::uint64_t size_of(safetensors_dtype type) {
  return detail::safetensors_dtypes[static_cast<std::size_t>(type)].size;
}
constexpr std::optional<safetensors_dtype> find_safetensors_dtype(std::string_view name) {
  for (const auto& row : detail::safetensors_dtypes) {
    if (row.name == name) return row.type;
  }
  return std::nullopt;
}
/// How the elements of a plait tensor are called in a file.
constexpr safetensors_dtype safetensors_dtype_of(dtype type) {
  switch (type) {
    case dtype::f32:
      return safetensors_dtype::f32;
    case dtype::f64:
      return safetensors_dtype::f64;
    case dtype::bf16:
      return safetensors_dtype::bf16;
    case dtype::i32:
      return safetensors_dtype::i32;
    case dtype::i64:
      return safetensors_dtype::i64;
    case dtype::u8:
      return safetensors_dtype::u8;
  }
  return safetensors_dtype::u8;
}

namespace detail {

inline std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (std::int64_t n : shape) append(text, {(text.empty() ? "" : ", "), n});
  return cat({"[", text, "]"});
}

}  // namespace detail

/// Whether a type is one of real numbers that weights have: loads convert these to each other.
constexpr bool is_floating(safetensors_dtype type) {
  return type == safetensors_dtype::f64 || type == safetensors_dtype::f32 || type == safetensors_dtype::f16 ||
         type == safetensors_dtype::bf16;
}

/// Returns the number of elements of a shape that a reader has accepted, whose product may overflow where an extent
/// is 0.
inline std::int64_t elements_of_shape(std::span<const std::int64_t> shape) {
  for (const std::int64_t extent : shape)
    if (extent == 0) return 0;
  std::int64_t n = 1;
  for (const std::int64_t extent : shape) n *= extent;
  return n;
}

/// One tensor of a file: row-major elements in `bytes`, which need not be aligned. A scalar has the shape {}.
struct safetensors_entry {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;

  /// Number of elements; exact for entries that a reader or writer has accepted.
  std::int64_t size() const { return static_cast<std::int64_t>(bytes.size() / size_of(dtype)); }
};

using safetensors_metadata = std::vector<std::pair<std::string, std::string>>;

/// The longest header that readers of the format accept.
inline constexpr std::uint64_t safetensors_max_header = 100'000'000;

/// Bytes of a tensor, or nothing when they do not fit 63 bits or an extent is negative.
inline std::optional<std::uint64_t> safetensors_bytes(const std::vector<std::int64_t>& shape, safetensors_dtype type) {
  std::uint64_t bytes = size_of(type);
  bool empty = false;
  for (std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    empty = empty || extent == 0;
  }
  if (empty) return 0;
  for (std::int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::uint64_t>(extent), &bytes)) return std::nullopt;
  }
  if (bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) return std::nullopt;
  return bytes;
}

/// IEEE binary16 to float, exact.
inline float float_from_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  float magnitude = 0;
  if (exponent == 31) {
    magnitude = fraction != 0 ? std::numeric_limits<float>::quiet_NaN() : std::numeric_limits<float>::infinity();
  } else {
    magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

namespace detail {

template <class Stored, class T, class Convert>
void convert_elements(const safetensors_entry& entry, T* out, Convert&& convert) {
  for (std::size_t i = 0; i < entry.bytes.size() / sizeof(Stored); ++i) {
    Stored value;
    std::memcpy(&value, entry.bytes.data() + i * sizeof(Stored), sizeof(Stored));
    out[i] = convert(value);
  }
}

}  // namespace detail

/// The elements of `entry` as `T`, row-major, `entry.size()` of them. To double, float and bf16: from F64, F32, F16 and
/// BF16, rounded to nearest even (F64 to bf16 by way of float). To integers: from BOOL and every integer type, values
/// that do not fit throw `error`. Other pairs throw `error`; nothing is converted between integers and floating point.
template <class T>
  requires(std::floating_point<T> || std::same_as<T, bf16> || (std::integral<T> && !std::same_as<T, bool>))
void copy_elements(const safetensors_entry& entry, T* out) {
  if constexpr (!std::integral<T>) {
    const auto widen = [](auto value) { return converted<T>(value); };
    switch (entry.dtype) {
      case safetensors_dtype::f64:
        return detail::convert_elements<double>(entry, out, widen);
      case safetensors_dtype::f32:
        return detail::convert_elements<float>(entry, out, widen);
      case safetensors_dtype::f16:
        return detail::convert_elements<std::uint16_t>(entry, out,
                                                       [](std::uint16_t b) { return converted<T>(float_from_f16(b)); });
      case safetensors_dtype::bf16:
        return detail::convert_elements<std::uint16_t>(entry, out,
                                                       [](std::uint16_t b) { return converted<T>(bf16{b}); });
      default:
        break;
    }
  } else {
    const auto narrow = [&](auto value) {
      if (!std::in_range<T>(value)) {
        fail({"tensor '", entry.name, "': the element ", value, " does not fit ", 8 * sizeof(T), " bits"});
      }
      return static_cast<T>(value);
    };
    switch (entry.dtype) {
      case safetensors_dtype::boolean:
      case safetensors_dtype::u8:
        return detail::convert_elements<std::uint8_t>(entry, out, narrow);
      case safetensors_dtype::i8:
        return detail::convert_elements<std::int8_t>(entry, out, narrow);
      case safetensors_dtype::i16:
        return detail::convert_elements<std::int16_t>(entry, out, narrow);
      case safetensors_dtype::u16:
        return detail::convert_elements<std::uint16_t>(entry, out, narrow);
      case safetensors_dtype::i32:
        return detail::convert_elements<std::int32_t>(entry, out, narrow);
      case safetensors_dtype::u32:
        return detail::convert_elements<std::uint32_t>(entry, out, narrow);
      case safetensors_dtype::i64:
        return detail::convert_elements<std::int64_t>(entry, out, narrow);
      case safetensors_dtype::u64:
        return detail::convert_elements<std::uint64_t>(entry, out, narrow);
      default:
        break;
    }
  }
  fail({"tensor '", entry.name, "': ", name_of(entry.dtype), " elements cannot be read as ",
        std::floating_point<T> ? "floating point" : "integers"});
}

namespace detail {

/// Returns names in quotes, the first twenty of them.
inline std::string quoted(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min<std::size_t>(names.size(), 20); ++i)
    append(text, {i == 0 ? "'" : ", '", names[i], "'"});
  if (names.size() > 20) append(text, {" and ", names.size() - 20, " more"});
  return text;
}

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
