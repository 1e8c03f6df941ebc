#include "content.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <variant>

#include "plait/io/json.hpp"

std::string_view kind_of_tensor(std::string_view name) {
  constexpr std::string_view before = "optim.";
  if (!name.starts_with(before)) return "weights";
  return name.substr(std::max(before.size(), name.find_last_of('.') + 1));
}

std::vector<kind_total> totals_of(const plait::manifest& saved) {
  std::vector<kind_total> out;
  for (const plait::stored_tensor& tensor : saved.tensors) {
    const std::string_view kind = kind_of_tensor(tensor.name);
    auto at = std::find_if(out.begin(), out.end(),
                           [&](const kind_total& t) { return t.kind == kind && t.dtype == tensor.dtype; });
    if (at == out.end()) at = out.insert(out.end(), {std::string(kind), tensor.dtype});
    at->tensors += 1;
    at->boxes += tensor.boxes.size();
    at->bytes += bytes_of(tensor);
    at->elements += bytes_of(tensor) / size_of(tensor.dtype);
  }
  return out;
}

std::vector<writer_total> writers_of(const plait::manifest& saved) {
  std::vector<writer_total> out;
  for (const plait::stored_file& file : saved.files) out.push_back({0, 0, file.bytes - file.header_bytes});
  for (const plait::stored_tensor& tensor : saved.tensors)
    for (const plait::stored_box& part : tensor.boxes) ++out[part.stored.file].boxes;
  for (const plait::stored_blob& blob : saved.blobs) ++out[blob.stored.file].blobs;
  return out;
}

std::uint64_t bytes_of(const plait::stored_tensor& tensor) {
  return plait::safetensors_bytes(tensor.shape, tensor.dtype).value();  // the manifest was checked
}

std::uint64_t bytes_of(const plait::manifest& saved) {
  std::uint64_t bytes = 0;
  for (const plait::stored_file& file : saved.files) bytes += file.bytes;
  return bytes;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, "x"));
}

std::string scalar_text(const plait::stored_scalar& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return plait::json_string(*text);
  return std::visit([](const auto& v) { return fmt::format("{}", v); }, value);
}
