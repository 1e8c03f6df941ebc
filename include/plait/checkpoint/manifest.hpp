// The contents of a saved step: tensors as boxes, each a range of bytes of a file, scalars and blobs. In their JSON one
// array of numbers has all boxes of a tensor, so that millions of them take seconds.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "plait/core/box.hpp"
#include "plait/core/text.hpp"

namespace plait {

/// A range of bytes of one file, counted from the file's first byte.
struct stored_bytes {
  std::uint32_t file = 0;  ///< index into `manifest::files`
  std::uint32_t crc32c = 0;
  std::uint64_t position = 0;
  std::uint64_t bytes = 0;
  friend bool operator==(const stored_bytes&, const stored_bytes&) = default;
};

/// A box of a tensor, row-major, without gaps. Entries from the tensor's rank on are 0.
struct stored_box {
  per_dim offset{}, extent{};
  stored_bytes stored;
  friend bool operator==(const stored_box&, const stored_box&) = default;
};

/// A tensor of any rank up to `max_dims` ({} is a scalar), covered by its boxes exactly once. A tensor without elements
/// has no boxes, and no box is empty.
struct stored_tensor {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
  std::vector<stored_box> boxes;

  /// Returns a box as the rest of plait counts: its `global` is the tensor's shape.
  box box_of(const stored_box& part) const {
    box out;
    out.dims = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), out.global.begin());
    out.offset = part.offset;
    out.local = part.extent;
    return out;
  }
  friend bool operator==(const stored_tensor&, const stored_tensor&) = default;
};

/// Named bytes that are no tensor: the state of a tokenizer, a text.
struct stored_blob {
  std::string name;
  stored_bytes stored;
  friend bool operator==(const stored_blob&, const stored_blob&) = default;
};

/// A data file: a safetensors file whose data are boxes and blobs, without gaps.
struct stored_file {
  std::string path;                 ///< relative to the step's directory: "data/w00017.safetensors"
  std::uint64_t bytes = 0;          ///< of the whole file
  std::uint64_t header_bytes = 0;   ///< of them before the data: length, header, padding
  std::uint32_t header_crc32c = 0;  ///< of the header bytes
  friend bool operator==(const stored_file&, const stored_file&) = default;
};

/// The version of manifests that this plait writes, and the only one that it reads.
inline constexpr std::uint64_t manifest_version = 1;
/// The "format" of every manifest.
inline constexpr std::string_view manifest_format = "plait checkpoint";

/// A scalar keeps its type and every bit. Whole numbers that fit 64 signed bits are `std::int64_t`, larger ones
/// `std::uint64_t`. A double may be infinite or a NaN.
using stored_scalar = std::variant<bool, std::int64_t, std::uint64_t, double, std::string>;
/// Values that are saved with tensors, by name: the position in the data, a seed, settings.
using saved_scalars = std::vector<std::pair<std::string, stored_scalar>>;

/// Everything that a committed step holds.
struct manifest {
  std::uint64_t step = 0;
  std::string layout;  ///< the layout of the writer in words; nothing reads it but people
  std::vector<stored_file> files;
  saved_scalars scalars;
  std::vector<stored_blob> blobs;
  std::vector<stored_tensor> tensors;
  friend bool operator==(const manifest&, const manifest&) = default;
};

/// Returns a box as people read it, "[0:2, 4:8]"; "[]" for the box of a scalar.
inline std::string text_of_box(const stored_tensor& tensor, const stored_box& part) {
  std::string out = "[";
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
    append(out, {d == 0 ? "" : ", ", part.offset[d], ":", part.offset[d] + part.extent[d]});
  }
  return out + "]";
}

/// Returns the name of a box in its data file: the tensor's name, followed by the box unless it is the whole tensor.
inline std::string entry_name(const stored_tensor& tensor, const stored_box& part) {
  const bool whole = std::equal(tensor.shape.begin(), tensor.shape.end(), part.extent.begin());
  return whole ? tensor.name : tensor.name + text_of_box(tensor, part);
}

/// Throws `error`, its text starting with `source`, unless `m` is what a step can be loaded from. Names are not empty,
/// UTF-8 and used once. Files are at different paths below data/ without "." or "..". Boxes lie in their tensors, take
/// the bytes of their extents and cover each element exactly once. Ranges of bytes follow the header of their file to
/// its end without holes or overlaps. The text names the tensor and the first element that is missing or there twice.
/// Takes O(n log n) for n boxes.
void check_manifest(const manifest& m, const std::string& source);

/// Returns the text of `m`. Throws `error` starting with `source` as `check_manifest` does.
std::string manifest_text(const manifest& m, const std::string& source = "manifest");

/// Reads the text of a manifest, strictly: the keys that `manifest_text` writes, each once, format and version first,
/// and nothing else; checked by `check_manifest`. Throws `error` starting with `source`.
manifest parse_manifest(std::string_view text, const std::string& source = "manifest");

namespace detail {

/// The text and the reader without `check_manifest`, for what one rank has written. The text has no line break at its
/// end, so that no part of it can be read.
std::string unchecked_text(const manifest& m);
manifest manifest_from(std::string_view text, const std::string& source);

}  // namespace detail

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/checkpoint/manifest.ipp"  // IWYU pragma: keep
#endif
