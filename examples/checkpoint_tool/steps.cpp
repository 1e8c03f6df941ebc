#include "steps.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <system_error>
#include <variant>

#include "plait/checkpoint/step_directory.hpp"
#include "plait/io/json.hpp"
#include "plait/io/posix_file_system.hpp"

namespace {

bool has_step_name(std::string_view path) {
  return plait::step_called(path.substr(path.find_last_of('/') + 1)).has_value();
}

}  // namespace

place find_place(const std::string& argument, const std::string& path) {
  if (path.empty()) plait::fail({argument, ": the path is empty; name a step or a folder of steps"});
  const auto kind = about(argument, [&] { return plait::machine_files().kind_of(path); });
  if (!kind) plait::fail({argument, ": there is no '", path, "'"});
  if (*kind != plait::file_kind::directory)
    plait::fail({argument, ": '", path, "' is not a directory; name a step or a folder of steps"});
  place out{path};
  while (out.path.size() > 1 && out.path.back() == '/') out.path.pop_back();
  if (has_step_name(out.path)) return {out.path, true};
  std::error_code fault;  // the path may be "." or a link, so its real name is needed
  const std::string full = std::filesystem::canonical(out.path, fault).string();
  if (!fault && has_step_name(full)) return {full, true};
  if (plait::machine_files().kind_of(out.path + "/manifest.json"))
    plait::fail({argument, ": '", path, "' has a manifest, but not the name of its step, such as ",
                 plait::step_name(100), "; give it back that name"});
  return out;
}

opened_step open_step(const std::string& argument, const std::string& path) {
  const place at = find_place(argument, path);
  if (!at.is_step) {
    const auto newest = about(argument, [&] { return plait::newest_step(plait::machine_files(), at.path); });
    plait::fail({argument, ": '", path, "' is not a step",
                 newest ? "; name one of those in it, such as " + newest->path : ", and there is none in it"});
  }
  return about(argument, [&] { return opened_step{at.path, plait::read_step(plait::machine_files(), at.path)}; });
}

bool lies_in(const std::string& directory, const std::string& other) {
  std::error_code fault;
  const auto inner = std::filesystem::weakly_canonical(directory, fault),
             outer = std::filesystem::canonical(other, fault);
  return !fault && std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

std::string_view kind_of_tensor(std::string_view name) {
  constexpr std::string_view before = "optim.";
  if (!name.starts_with(before)) return "weights";
  return name.substr(std::max(before.size(), name.find_last_of('.') + 1));
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
