// Compares two tensors of saved steps element by element.
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
#include "plait/core/error.hpp"
#include "plait/core/types.hpp"

namespace plait {

/// The difference of two tensors a and b of one shape and type.
struct tensor_difference {
  std::uint64_t elements = 0;   ///< number of compared elements
  std::uint64_t differing = 0;  ///< elements that differ in any bit: 0 and -0 count, and so do two NaNs
  double largest = 0;           ///< the largest finite |a| or |b|
  double absolute = 0;          ///< the largest |a - b|; infinite if only one is finite; two NaNs have the difference 0
  double relative = 0;          ///< the largest |a - b| / max(|a|, |b|) of one element; at most 2, or infinite

  bool identical() const { return differing == 0; }
  /// Whether no element differs by more than `tolerance` times the largest element. So noise in small elements counts
  /// as little as in a product with the tensor.
  bool within(double tolerance) const { return absolute <= tolerance * largest; }
};

namespace detail {

inline void add_size(double x, tensor_difference& into) {
  const double size = std::abs(x);
  if (size <= std::numeric_limits<double>::max()) into.largest = std::max(into.largest, size);
}

/// Adds two elements that differ. `gap` is |a - b| if both are finite.
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

/// Adds elements that are stored as `Stored`.
template <class Stored>
void add_elements(std::span<const std::byte> a, std::span<const std::byte> b, tensor_difference& into) {
  const auto value = [](Stored stored) {
    if constexpr (std::same_as<Stored, bf16>)
      return to_float(stored);
    else
      return value_of_element(stored);
  };
  for (std::size_t at = 0; at < a.size(); at += sizeof(Stored)) {
    Stored x{}, y{};
    std::memcpy(&x, a.data() + at, sizeof(Stored));
    std::memcpy(&y, b.data() + at, sizeof(Stored));
    const auto p = value(x), q = value(y);
    add_size(static_cast<double>(p), into);
    if (std::memcmp(&x, &y, sizeof(Stored)) == 0) continue;
    add_size(static_cast<double>(q), into);
    double gap = 0;
    if constexpr (std::integral<decltype(value(x))>) {  // exact in 64 bits too
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

/// Adds elements of two tensors to their difference. Throws `error` if the numbers of elements differ.
inline void add_difference(safetensors_dtype type, std::span<const std::byte> a, std::span<const std::byte> b,
                           tensor_difference& into) {
  if (a.size() != b.size() || a.size() % size_of(type) != 0)
    fail({"elements of ", a.size(), " and of ", b.size(), " bytes cannot be compared as ", name_of(type)});
  detail::with_stored_type(type, [&]<class Stored>(Stored) { detail::add_elements<Stored>(a, b, into); });
}

/// Reads and compares two tensors of one shape and type, with memory for about `chunk_bytes` of each. Throws `error` if
/// shapes or types differ, and as `flat_reader::read` does for unreadable or damaged data.
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
