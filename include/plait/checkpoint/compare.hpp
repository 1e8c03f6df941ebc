// Compares tensors of two saved steps, element by element, whatever boxes each was written in.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/checkpoint/safetensors.hpp"
#include "plait/checkpoint/step_data.hpp"
#include "plait/core/dtype.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// By how much the elements of two tensors a and b of one shape and type differ.
struct tensor_difference {
  std::uint64_t elements = 0;   ///< that were compared
  std::uint64_t differing = 0;  ///< in any bit: 0 and -0 count, and so do two NaNs
  double largest = 0;           ///< the largest finite |a| or |b|
  double absolute = 0;  ///< the largest |a - b|; infinite where one is finite and the other not; two NaNs are alike
  double relative = 0;  ///< the largest |a - b| / max(|a|, |b|) of one element; at most 2, or infinite

  bool identical() const { return differing == 0; }
  /// Whether no element differs by more than `tolerance` times the largest of the tensor. Noise in elements that are
  /// small beside others counts for as little as in a product with the tensor.
  bool within(double tolerance) const { return absolute <= tolerance * largest; }
};

namespace detail {

inline void add_size(double x, tensor_difference& into) {
  const double size = std::abs(x);
  if (size <= std::numeric_limits<double>::max()) into.largest = std::max(into.largest, size);
}

/// Adds two elements that differ. `gap` is |a - b| of numbers that are both finite.
inline void add_gap(double a, double b, double gap, tensor_difference& into) {
  ++into.differing;
  if (std::isnan(a) && std::isnan(b)) return;
  if (!std::isfinite(a) || !std::isfinite(b)) {
    into.absolute = into.relative = std::numeric_limits<double>::infinity();
  } else if (gap > 0) {
    into.absolute = std::max(into.absolute, gap);
    into.relative = std::max(into.relative, gap / std::max(std::abs(a), std::abs(b)));
  }
}

/// Adds elements that are stored as `Stored` and stand for the numbers that `value` makes of them.
template <class Stored, class Value>
void add_elements(std::span<const std::byte> a, std::span<const std::byte> b, tensor_difference& into, Value&& value) {
  for (std::size_t at = 0; at < a.size(); at += sizeof(Stored)) {
    Stored x, y;
    std::memcpy(&x, a.data() + at, sizeof(Stored));
    std::memcpy(&y, b.data() + at, sizeof(Stored));
    const auto p = value(x), q = value(y);
    add_size(static_cast<double>(p), into);
    if (std::memcmp(&x, &y, sizeof(Stored)) == 0) continue;
    add_size(static_cast<double>(q), into);
    double gap = 0;
    if constexpr (std::integral<decltype(p)>) {  // exact in 64 bits too
      const auto u = static_cast<std::uint64_t>(p), v = static_cast<std::uint64_t>(q);
      gap = static_cast<double>(p > q ? u - v : v - u);
    } else {
      gap = std::abs(static_cast<double>(p) - static_cast<double>(q));
    }
    add_gap(static_cast<double>(p), static_cast<double>(q), gap, into);
  }
  into.elements += a.size() / sizeof(Stored);
}

}  // namespace detail

/// Adds elements of two tensors to what is known of their difference. Throws `error` if there are not as many of each.
inline void add_difference(safetensors_dtype type, std::span<const std::byte> a, std::span<const std::byte> b,
                           tensor_difference& into) {
  if (a.size() != b.size() || a.size() % size_of(type) != 0)
    fail({"elements of ", a.size(), " and of ", b.size(), " bytes cannot be compared as ", name_of(type)});
  const auto as = [&]<class Stored>(auto&& value) { detail::add_elements<Stored>(a, b, into, value); };
  const auto itself = [](auto x) { return x; };
  switch (type) {
    case safetensors_dtype::boolean:
    case safetensors_dtype::u8:
      return as.operator()<std::uint8_t>(itself);
    case safetensors_dtype::i8:
      return as.operator()<std::int8_t>(itself);
    case safetensors_dtype::i16:
      return as.operator()<std::int16_t>(itself);
    case safetensors_dtype::u16:
      return as.operator()<std::uint16_t>(itself);
    case safetensors_dtype::i32:
      return as.operator()<std::int32_t>(itself);
    case safetensors_dtype::u32:
      return as.operator()<std::uint32_t>(itself);
    case safetensors_dtype::i64:
      return as.operator()<std::int64_t>(itself);
    case safetensors_dtype::u64:
      return as.operator()<std::uint64_t>(itself);
    case safetensors_dtype::f16:
      return as.operator()<std::uint16_t>([](std::uint16_t bits) { return float_from_f16(bits); });
    case safetensors_dtype::bf16:
      return as.operator()<std::uint16_t>([](std::uint16_t bits) { return to_float(bf16{bits}); });
    case safetensors_dtype::f32:
      return as.operator()<float>(itself);
    case safetensors_dtype::f64:
      return as.operator()<double>(itself);
  }
}

/// Reads two tensors of one shape and type from end to end, with memory for about `chunk_bytes` of each, and compares
/// them. Throws `error` where they are of another shape or type, and as `flat_reader::read` does for what cannot be
/// read or is damaged.
inline tensor_difference compare_tensors(flat_reader& a, const stored_tensor& in_a, flat_reader& b,
                                         const stored_tensor& in_b, std::uint64_t chunk_bytes) {
  if (in_a.shape != in_b.shape || in_a.dtype != in_b.dtype)
    fail({"tensor '", in_a.name, "' and tensor '", in_b.name, "' are of another shape or type"});
  tensor_difference out;
  std::vector<std::byte> values_a, values_b;
  each_chunk(in_a, chunk_bytes, [&](std::int64_t begin, std::int64_t end, std::uint64_t bytes) {
    values_a.resize(bytes);
    values_b.resize(bytes);
    a.read(in_a, begin, end, values_a.data());
    b.read(in_b, begin, end, values_b.data());
    add_difference(in_a.dtype, values_a, values_b, out);
  });
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
