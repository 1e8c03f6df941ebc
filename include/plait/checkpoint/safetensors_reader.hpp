// Reads safetensors files, strictly, as whole tensors that lie in the mapped file. Malformed files and their messages:
// tests/unit/checkpoint/safetensors.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/checkpoint/safetensors_format.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/mapped_file.hpp"

namespace plait {

/// The content of a safetensors file.
struct safetensors_contents {
  std::vector<safetensors_entry> entries;  ///< in the order of their data
  safetensors_metadata metadata;
};

/// A tensor of a file, and where in the file its bytes are.
struct safetensors_position {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
  std::uint64_t position = 0, bytes = 0;
};

/// The header of a safetensors file.
struct safetensors_table {
  std::vector<safetensors_position> tensors;  ///< in the order of their data
  safetensors_metadata metadata;
};

/// Returns how many bytes come before the data: 8 and those of the header. `start` is the file's first bytes, 8 at
/// least where the file has so many. Throws `error`, its text starting with `source`, where there are not so many.
std::uint64_t safetensors_header_end(std::span<const std::byte> start, std::uint64_t file_bytes,
                                     const std::string& source);

/// Reads the header of a safetensors file: u64 length N of the header, JSON of N bytes, data. `start` is the file's
/// bytes as far as the data at least, `file_bytes` the length of all of it. White space around the JSON is allowed, all
/// else is strict: data of the tensors contiguous from 0 to the last byte of the file without holes or overlaps, each
/// as long as its shape says, no name or key twice. Throws `error`, its text starting with `source` and naming the
/// tensor.
safetensors_table parse_safetensors_header(std::span<const std::byte> start, std::uint64_t file_bytes,
                                           const std::string& source);

/// Reads the bytes of a whole safetensors file. The spans of the result point into `file`. Throws as
/// `parse_safetensors_header`.
inline safetensors_contents parse_safetensors(std::span<const std::byte> file, const std::string& source) {
  safetensors_table table = parse_safetensors_header(file, file.size(), source);
  safetensors_contents out{{}, std::move(table.metadata)};
  for (safetensors_position& t : table.tensors)
    out.entries.push_back({std::move(t.name), t.dtype, std::move(t.shape), file.subspan(t.position, t.bytes)});
  return out;
}

/// An open safetensors file. The entries point into the mapped file and live as long as any copy of the reader.
class safetensors_reader {
 public:
  /// Errors as `mapped_file` and `parse_safetensors`, both naming `field` and the path.
  explicit safetensors_reader(const std::string& path, const std::string& field = "path")
      : file_(std::make_shared<const mapped_file>(path, field)),
        source_(cat({field, ": '", path, "'"})),
        contents_(parse_safetensors(file_->bytes(), source_)) {
    by_name_.resize(contents_.entries.size());
    for (std::size_t i = 0; i < by_name_.size(); ++i) by_name_[i] = i;
    std::sort(by_name_.begin(), by_name_.end(), [&](std::size_t a, std::size_t b) { return name(a) < name(b); });
  }

  const std::vector<safetensors_entry>& entries() const { return contents_.entries; }
  const safetensors_metadata& metadata() const { return contents_.metadata; }

  /// The tensor called `wanted`, or null.
  const safetensors_entry* find(std::string_view wanted) const {
    const auto found = std::lower_bound(by_name_.begin(), by_name_.end(), wanted,
                                        [&](std::size_t i, std::string_view key) { return name(i) < key; });
    return found != by_name_.end() && name(*found) == wanted ? &contents_.entries[*found] : nullptr;
  }
  /// The tensor called `wanted`; throws `error` when there is none.
  const safetensors_entry& at(std::string_view wanted) const {
    if (const auto* entry = find(wanted)) return *entry;
    fail({source_, ": there is no tensor '", wanted, "' among its ", entries().size()});
  }
  /// The elements of tensor `wanted` as `T`; errors as `at` and `copy_elements`.
  template <class T>
  std::vector<T> read(std::string_view wanted) const {
    const safetensors_entry& entry = at(wanted);
    std::vector<T> out(static_cast<std::size_t>(entry.size()));
    copy_elements(entry, out.data());
    return out;
  }

 private:
  std::string_view name(std::size_t i) const { return contents_.entries[i].name; }

  std::shared_ptr<const mapped_file> file_;
  std::string source_;
  safetensors_contents contents_;
  std::vector<std::size_t> by_name_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/checkpoint/safetensors_reader.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
