// The definitions of manifest_json.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <bit>
#include <charconv>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "plait/checkpoint/manifest_check.hpp"
#include "plait/checkpoint/manifest_reader.hpp"
#include "plait/core/compiled.hpp"
#include "plait/io/json_writer.hpp"

namespace plait {

namespace detail {

/// Appends a number in decimal digits, after a comma unless it is the first of a list.
template <class Integer>
void append_number(std::string& out, Integer value) {
  char digits[24];
  if (out.back() != '[') out += ',';
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}
inline void append_range(std::string& out, const stored_bytes& stored) {
  append_number(out, stored.file);
  append_number(out, stored.position);
  append_number(out, stored.bytes);
  append_number(out, stored.crc32c);
}

/// A scalar as a JSON value. JSON has no infinity and no NaN: such a double is an object with its bits.
inline std::string scalar_text(const stored_scalar& value) {
  if (const auto* number = std::get_if<double>(&value); number != nullptr && !std::isfinite(*number)) {
    char digits[manifest_hex_digits + 1];
    std::snprintf(digits, sizeof digits, "%016" PRIx64, std::bit_cast<std::uint64_t>(*number));
    return cat({"{\"float64\": \"", digits, "\"}"});
  }
  struct writer {
    std::string operator()(bool b) const { return b ? "true" : "false"; }
    std::string operator()(std::int64_t i) const { return std::to_string(i); }
    std::string operator()(std::uint64_t i) const { return std::to_string(i); }
    std::string operator()(double d) const { return json_number(d); }
    std::string operator()(const std::string& s) const { return json_string(s); }
  };
  return std::visit(writer{}, value);
}

}  // namespace detail

PLAIT_INLINE std::string manifest_text(const manifest& m, const std::string& source) {
  check_manifest(m, source);
  std::string out = cat({"{\n\"format\": ", json_string(manifest_format), ",\n\"version\": ", manifest_version,
                         ",\n\"step\": ", m.step, ",\n\"layout\": ", json_string(m.layout), ",\n\"files\": ["});
  const auto next_line = [&](bool first) { out += first ? "\n" : ",\n"; };
  for (const stored_file& file : m.files) {
    next_line(&file == &m.files.front());
    append(out, {"[", json_string(file.path), ",", file.bytes, ",", file.header_bytes, ",", file.header_crc32c, "]"});
  }
  out += "],\n\"scalars\": {";
  for (const auto& scalar : m.scalars) {
    next_line(&scalar == &m.scalars.front());
    append(out, {json_string(scalar.first), ": ", detail::scalar_text(scalar.second)});
  }
  out += "},\n\"blobs\": {";
  for (const stored_blob& blob : m.blobs) {
    next_line(&blob == &m.blobs.front());
    append(out, {json_string(blob.name), ": ["});
    detail::append_range(out, blob.stored);
    out += ']';
  }
  out += "},\n\"tensors\": {";
  for (const stored_tensor& tensor : m.tensors) {
    next_line(&tensor == &m.tensors.front());
    append(out, {json_string(tensor.name), ": {\"dtype\": \"", name_of(tensor.dtype), "\", \"shape\": ["});
    for (const std::int64_t extent : tensor.shape) detail::append_number(out, extent);
    out += "], \"boxes\": [";
    for (const stored_box& part : tensor.boxes) {
      for (std::size_t d = 0; d < tensor.shape.size(); ++d) detail::append_number(out, part.offset[d]);
      for (std::size_t d = 0; d < tensor.shape.size(); ++d) detail::append_number(out, part.extent[d]);
      detail::append_range(out, part.stored);
    }
    out += "]}";
  }
  return out + "}\n}\n";
}

PLAIT_INLINE manifest parse_manifest(std::string_view text, const std::string& source) {
  detail::manifest_reader reader(source);
  if (text.find('\0') != text.npos) reader.bad("it contains a zero byte");  // the JSON parser would stop there
  nlohmann::json::sax_parse(text.data(), text.data() + text.size(), &reader);
  check_manifest(reader.out, source);
  return std::move(reader.out);
}

}  // namespace plait
