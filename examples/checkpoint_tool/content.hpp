#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/checkpoint/manifest.hpp"

/// Returns the kind of a tensor: "weights", or the part of an optimizer's state, as "exp_avg" for "optim.NAME.exp_avg".
std::string_view kind_of_tensor(std::string_view name);

/// The total of the tensors of one kind and one type of elements.
struct kind_total {
  std::string kind;
  plait::safetensors_dtype dtype{};
  std::uint64_t tensors = 0, boxes = 0, elements = 0, bytes = 0;
};
/// Returns the totals by kind and type, in the order in which a manifest has them.
std::vector<kind_total> totals_of(const plait::manifest& saved);

/// The total of one writer.
struct writer_total {
  std::uint64_t boxes = 0, blobs = 0;
  std::uint64_t data = 0;  ///< bytes after the header
};
/// Returns a total for each file of a manifest.
std::vector<writer_total> writers_of(const plait::manifest& saved);

/// The number of bytes of a tensor that are read at once.
inline constexpr std::uint64_t chunk_bytes = 8 << 20;

std::uint64_t bytes_of(const plait::stored_tensor& tensor);
/// Returns the bytes of all data files.
std::uint64_t bytes_of(const plait::manifest& saved);
/// Returns "2x3", or "scalar".
std::string shape_text(const std::vector<std::int64_t>& shape);
/// Returns "true", "7", "0.1" or a string in quotes.
std::string scalar_text(const plait::stored_scalar& value);
