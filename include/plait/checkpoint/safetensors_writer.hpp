// Writes whole tensors of the host's memory as a safetensors file, at once, and plans where tensors lie in a file that
// is written piece by piece: checkpoint/safetensors_stream.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "plait/checkpoint/safetensors_format.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/json_writer.hpp"
#include "plait/io/utf8.hpp"

namespace plait {

/// Where the data of a file that plait writes start is a multiple of this many bytes, a page.
inline constexpr std::uint64_t safetensors_alignment = 4096;

/// A tensor of a file whose data come later: row-major, a scalar has the shape {}.
struct safetensors_declaration {
  std::string name;
  safetensors_dtype dtype = safetensors_dtype::f32;
  std::vector<std::int64_t> shape;
};

/// Where everything in a file lies, in bytes from its first one.
struct safetensors_plan {
  std::string header;                    ///< the first bytes of the file: header length and header, padded with spaces
  std::vector<std::uint64_t> positions;  ///< of each tensor's data, in the order they were declared
  std::vector<std::uint64_t> bytes;      ///< of each tensor
  std::uint64_t file_bytes = 0;
};

/// Returns the plan of a file with the data of `tensors` in this order; the data start at a multiple of
/// `safetensors_alignment`. Throws `error`, its text starting with `source`, for a name that is empty, reserved, used
/// twice or no UTF-8, and for sizes that overflow or take too long a header.
inline safetensors_plan plan_safetensors(const std::vector<safetensors_declaration>& tensors,
                                         const safetensors_metadata& metadata, const std::string& source) {
  std::unordered_set<std::string_view> names;
  const auto claim = [&](const std::string& name) {
    if (!is_utf8(name)) fail({source, ": the name '", name, "' is not UTF-8"});
    if (!names.insert(name).second) fail({source, ": the name '", name, "' is used twice"});
  };
  json_object header;
  if (!metadata.empty()) {
    json_object values;
    for (const auto& [key, value] : metadata) {
      claim(key);
      if (!is_utf8(value)) fail({source, ": the metadata of '", key, "' is not UTF-8"});
      values.add(key, value);
    }
    header.add("__metadata__", values);
  }
  names.clear();
  safetensors_plan out;
  std::uint64_t end = 0;  // of the data, from their first byte
  for (const safetensors_declaration& tensor : tensors) {
    if (tensor.name.empty() || tensor.name == "__metadata__")
      fail({source, ": '", tensor.name, "' cannot be the name of a tensor"});
    claim(tensor.name);
    const auto bytes = safetensors_bytes(tensor.shape, tensor.dtype);
    if (!bytes || *bytes > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()) - end)
      fail({source, ": tensor '", tensor.name, "' makes the file longer than 2^63 bytes, or an extent is negative"});
    out.positions.push_back(end);
    out.bytes.push_back(*bytes);
    end += *bytes;
    header.add(tensor.name, json_object()
                                .add("dtype", name_of(tensor.dtype))
                                .add("shape", tensor.shape)
                                .add("data_offsets", std::vector<std::uint64_t>{end - *bytes, end}));
  }
  std::string text = header.text();
  const std::uint64_t unpadded = 8 + text.size();
  text.append((safetensors_alignment - unpadded % safetensors_alignment) % safetensors_alignment, ' ');
  if (text.size() > safetensors_max_header) {
    fail({source, ": ", tensors.size(), " tensors make a header of ", text.size(), " bytes; readers accept ",
          safetensors_max_header, "; use several files"});
  }
  const std::uint64_t length = text.size();
  out.header.resize(8);
  std::memcpy(out.header.data(), &length, 8);
  out.header += text;
  for (std::uint64_t& position : out.positions) position += out.header.size();
  out.file_bytes = out.header.size() + end;
  return out;
}

/// Writes a safetensors file in one step. Tensors with wider elements come first (else in the given order), so that
/// each starts on a multiple of its element size. Throws as `plan_safetensors` and `atomic_file` do, naming `field`,
/// and for data whose length is not that of the shape.
inline void write_safetensors(const std::string& path, std::vector<safetensors_entry> entries,
                              const safetensors_metadata& metadata = {}, const std::string& field = "path") {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return size_of(a.dtype) > size_of(b.dtype); });
  const std::string source = cat({field, ": '", path, "'"});
  std::vector<safetensors_declaration> tensors;
  for (const safetensors_entry& entry : entries) tensors.push_back({entry.name, entry.dtype, entry.shape});
  const safetensors_plan plan = plan_safetensors(tensors, metadata, source);
  for (std::size_t i = 0; i < entries.size(); ++i) {
    if (entries[i].bytes.size() != plan.bytes[i]) {
      fail({source, ": tensor '", entries[i].name, "' has ", entries[i].bytes.size(),
            " bytes, and its shape and dtype take ", plan.bytes[i]});
    }
  }
  atomic_file file(path, field);
  file.write(plan.header);
  for (const safetensors_entry& entry : entries) file.write(entry.bytes.data(), entry.bytes.size());
  file.commit();
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
