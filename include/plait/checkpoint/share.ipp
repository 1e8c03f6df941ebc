// The definitions of share.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/text.hpp"
#include "plait/io/json_writer.hpp"

namespace plait {

PLAIT_INLINE std::string note_text(const written_share& share) {
  std::string tensors;
  for (const stored_tensor& t : share.tensors) {
    std::string numbers;
    for (const stored_box& b : t.boxes) {
      for (std::size_t d = 0; d < t.shape.size(); ++d) append(numbers, {b.offset[d], ",", b.extent[d], ","});
      append(numbers, {b.stored.position, ",", b.stored.bytes, ",", b.stored.crc32c, ","});
    }
    if (!numbers.empty()) numbers.pop_back();
    std::string shape;
    for (const std::int64_t n : t.shape) append(shape, {shape.empty() ? "" : ",", n});
    append(tensors, {tensors.empty() ? "" : ",\n", "[", json_string(t.name), ",", json_string(name_of(t.dtype)), ",[",
                     shape, "],[", numbers, "]]"});
  }
  const stored_file& f = share.file;
  return cat(
      {"[", json_string(f.path), ",", f.bytes, ",", f.header_bytes, ",", f.header_crc32c, ",[", tensors, "]]\n"});
}
PLAIT_INLINE written_share parse_note(const std::string& text) {
  const nlohmann::json note = nlohmann::json::parse(text);
  written_share share;
  share.file = {note.at(0), note.at(1), note.at(2), note.at(3)};
  for (const auto& t : note.at(4)) {
    stored_tensor tensor{t.at(0), safetensors_dtype::f32, t.at(2), {}};
    tensor.dtype = find_safetensors_dtype(t.at(1).get<std::string>()).value();
    const std::vector<std::uint64_t> numbers = t.at(3);
    for (std::size_t i = 0; i < numbers.size();) {
      stored_box b;
      for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
        b.offset[d] = static_cast<std::int64_t>(numbers.at(i++));
        b.extent[d] = static_cast<std::int64_t>(numbers.at(i++));
      }
      b.stored.position = numbers.at(i++);
      b.stored.bytes = numbers.at(i++);
      b.stored.crc32c = static_cast<std::uint32_t>(numbers.at(i++));
      tensor.boxes.push_back(b);
    }
    share.tensors.push_back(std::move(tensor));
  }
  return share;
}

}  // namespace plait
