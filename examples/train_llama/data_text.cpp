#include "data_text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "plait/io/mapped_file.hpp"
#include "train_llama/data/token_file.hpp"

std::uint64_t digest_of(std::span<const std::byte> bytes, std::uint64_t digest) {
  while (!bytes.empty()) {
    std::uint64_t word = 0;
    const std::size_t n = std::min(bytes.size(), sizeof word);
    std::memcpy(&word, bytes.data(), n);
    digest = (digest ^ word) * 0x9E3779B97F4A7C15ull;
    digest ^= digest >> 32;
    bytes = bytes.subspan(n);
  }
  return digest;
}

std::string content_text(const std::string& path) {
  constexpr std::size_t whole = std::size_t{64} << 20, end = std::size_t{1} << 20, piece = 4096, pieces = 4096;
  const plait::mapped_file file(path, "--data");
  const std::span<const std::byte> bytes = file.bytes();
  std::uint64_t digest = bytes.size();
  if (bytes.size() <= whole) {
    digest = digest_of(bytes, digest);
  } else {
    digest = digest_of(bytes.first(end), digest);
    for (std::size_t i = 0; i < pieces; ++i)
      digest = digest_of(bytes.subspan(end + (bytes.size() - 2 * end - piece) / pieces * i, piece), digest);
    digest = digest_of(bytes.last(end), digest);
  }
  return fmt::format("{} bytes with digest {:016x}", bytes.size(), digest);
}

std::vector<std::string> files_of(const std::string& path) {
  std::string stem = path;
  if (stem.ends_with(".bin") || stem.ends_with(".idx")) stem.resize(stem.size() - 4);
  std::vector<std::string> files;
  std::error_code ignored;
  for (const std::string& file : {path, stem + ".bin", stem + ".idx"})
    if (std::filesystem::is_regular_file(file, ignored) && std::find(files.begin(), files.end(), file) == files.end())
      files.push_back(file);
  return files;
}

std::string data_text(const options& opt) {
  std::string text;
  for (std::size_t i = 0; i < opt.data.size(); ++i) {
    for (const std::string& file : files_of(opt.data[i]))
      text += fmt::format("{}{}", text.empty() ? "" : ", ", content_text(file));
    const plait::token_format format = plait::token_format_from(opt.data_format, "--data-format");
    text += fmt::format(
        " as {}",
        plait::name_of(format == plait::token_format::automatic ? plait::guess_token_format(opt.data[i]) : format));
    if (!opt.data_weights.empty()) text += fmt::format(" at weight {}", opt.data_weights[i]);
  }
  return text + fmt::format(", {} held out", opt.held_out);
}
