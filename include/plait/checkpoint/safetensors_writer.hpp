// Writes whole tensors of the host's memory as a safetensors file, at once. It collects nothing from ranks or devices:
// the caller has the bytes. Next: checkpoint/safetensors_format.hpp, io/atomic_file.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "plait/checkpoint/safetensors_format.hpp"
#include "plait/core/error.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/json_writer.hpp"
#include "plait/io/utf8.hpp"

namespace plait {

/// Where the data of a file that plait writes start is a multiple of this many bytes, a page.
inline constexpr std::uint64_t safetensors_alignment = 4096;

/// The first bytes of a safetensors file whose data are those of `tensors` in this order: header length and header,
/// padded with spaces. Throws `error`, its text starting with `source`, for a name that is empty, reserved, used twice
/// or no UTF-8, and for a tensor that is too large.
inline std::string safetensors_header_text(const std::vector<safetensors_shape>& tensors,
                                           const safetensors_metadata& metadata, const std::string& source) {
  std::unordered_set<std::string> names;
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
  std::uint64_t position = 0;
  for (const safetensors_shape& entry : tensors) {
    if (entry.name.empty() || entry.name == "__metadata__") {
      fail({source, ": '", entry.name, "' cannot be the name of a tensor"});
    }
    claim(entry.name);
    const auto bytes = safetensors_bytes(entry.shape, entry.dtype);
    if (!bytes) fail({source, ": tensor '", entry.name, "' takes more than 2^63 bytes, or an extent is negative"});
    const std::uint64_t end = position + *bytes;
    header.add(entry.name, json_object()
                               .add("dtype", name_of(entry.dtype))
                               .add("shape", entry.shape)
                               .add("data_offsets", std::vector<std::uint64_t>{position, end}));
    position = end;
  }
  std::string text = header.text();
  const std::uint64_t unpadded = 8 + text.size();
  text.append((safetensors_alignment - unpadded % safetensors_alignment) % safetensors_alignment, ' ');
  if (text.size() > safetensors_max_header) {
    fail({source, ": ", tensors.size(), " tensors make a header of ", text.size(), " bytes; readers accept ",
          safetensors_max_header, "; use several files"});
  }
  std::string length(8, '\0');
  const std::uint64_t size = text.size();
  std::memcpy(length.data(), &size, 8);
  return length + text;
}

/// Writes a safetensors file in one step. Tensors with wider elements come first (else in the given order), so that
/// each starts on a multiple of its element size. Errors as `safetensors_header_text` and `atomic_file`,
/// naming `knob`, and for data whose length is not that of the shape.
inline void write_safetensors(const std::string& path, std::vector<safetensors_entry> entries,
                              const safetensors_metadata& metadata = {}, const std::string& knob = "--save") {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const auto& a, const auto& b) { return size_of(a.dtype) > size_of(b.dtype); });
  const std::string source = cat({knob, ": '", path, "'"});
  std::vector<safetensors_shape> shapes;
  for (const safetensors_entry& entry : entries) {
    const auto bytes = safetensors_bytes(entry.shape, entry.dtype);
    if (bytes && *bytes != entry.bytes.size())
      fail({source, ": tensor '", entry.name, "' has ", entry.bytes.size(), " bytes, and its shape and dtype take ",
            *bytes});
    shapes.push_back({entry.name, entry.dtype, entry.shape});
  }
  const std::string header = safetensors_header_text(shapes, metadata, source);
  atomic_file file(path, knob);
  file.write(header);
  for (const safetensors_entry& entry : entries) file.write(entry.bytes.data(), entry.bytes.size());
  file.commit();
}

}  // namespace plait
