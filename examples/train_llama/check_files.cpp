#include "check_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/json.hpp"

std::filesystem::path plain(const std::string& path) {
  std::error_code ignored;
  std::filesystem::path at = std::filesystem::absolute(path, ignored);
  // A link to what is not there yet leads there all the same.
  for (int links = 0; links < 40 && std::filesystem::is_symlink(at, ignored); ++links) {
    const std::filesystem::path to = std::filesystem::read_symlink(at, ignored);
    if (ignored || std::filesystem::exists(at, ignored)) break;
    at = at.parent_path() / to;
  }
  return std::filesystem::weakly_canonical(at, ignored);
}

namespace {

/// Whether what is written there is kept nowhere, as of a pipe or a terminal.
bool is_stream(const std::string& path) {
  std::error_code ignored;
  const auto kind = std::filesystem::status(path, ignored).type();
  return kind == std::filesystem::file_type::character || kind == std::filesystem::file_type::fifo;
}

/// A file that is written at the end must be writable at the beginning. Leaves no trace.
void writable(const char* flag, const std::string& path) {
  if (!path.empty() && !is_stream(path)) plait::atomic_file(path, flag);
}

/// Whether two paths lead to one file, which need not be there.
bool same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  return std::filesystem::equivalent(a, b, ignored) || plain(a) == plain(b);
}

/// Whether `path` is `folder` or in it.
bool is_within(const std::string& path, const std::string& folder) {
  const std::filesystem::path way = plain(path).lexically_relative(plain(folder));
  return !way.empty() && *way.begin() != "..";
}

/// A folder of saved steps, or a step, that an option names.
using named_folder = std::pair<const char*, std::string>;

/// Refuses to write into a saved state, or to what a link in it leads to.
void check_saved(const char* flag, const std::string& path, const named_folder& saved) {
  const auto refuse = [&](const char* why) {
    plait::fail(fmt::format("{} names '{}', {} {} {}, where training states are kept; name a file elsewhere", flag,
                            path, why, saved.first, saved.second));
  };
  if (is_within(path, saved.second)) refuse("in");
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return;
  using walk = std::filesystem::recursive_directory_iterator;
  const auto how = std::filesystem::directory_options::follow_directory_symlink |
                   std::filesystem::directory_options::skip_permission_denied;
  for (walk file(saved.second, how, ignored), end; !ignored && file != end; file.increment(ignored))
    if (same_file(path, file->path().string())) refuse("a file of");
}

/// The folders of saved steps that a run reads or writes.
std::vector<named_folder> saved_folders(const options& opt, bool begins_from_step) {
  std::vector<named_folder> all;
  if (opt.resume != "none" && opt.resume != "auto") all.emplace_back("--resume", opt.resume);
  if (!opt.checkpoint_dir.empty()) all.emplace_back("--checkpoint-dir", opt.checkpoint_dir);
  if (begins_from_step) all.emplace_back("--init-from", opt.init_from);
  return all;
}

/// Refuses names that a saved step is to repeat and cannot: its manifest is UTF-8, and a save would find out last.
void check_names_in_steps(const options& opt) {
  if (opt.checkpoint_dir.empty()) return;
  for (const auto& [flag, name] : {std::pair("--model", &opt.model), std::pair("--schedule", &opt.schedule)})
    if (!plait::is_utf8(*name))
      plait::fail(fmt::format(
          "{} names a path that is not UTF-8, which no step in --checkpoint-dir could repeat; give it another name",
          flag));
}

}  // namespace

void check_files(const options& opt, bool begins_from_step) {
  check_names_in_steps(opt);
  std::vector<std::pair<const char*, const std::string*>> outputs = {{"--log", &opt.log},
                                                                     {"--plot", &opt.plot},
                                                                     {"--report", &opt.report},
                                                                     {"--trace", &opt.trace},
                                                                     {"--timeline", &opt.timeline}};
  std::vector<std::pair<const char*, std::string>> inputs;
  if (std::filesystem::exists(opt.products))
    inputs.emplace_back("--products", opt.products);
  else
    outputs.emplace_back("--products", &opt.products);
  for (const std::string& path : opt.data) {
    for (const char* ending : {"", ".bin", ".idx"}) inputs.emplace_back("--data", path + ending);
    if (path.ends_with(".bin") || path.ends_with(".idx"))  // which are read in pairs
      for (const char* ending : {".bin", ".idx"})
        inputs.emplace_back("--data", path.substr(0, path.size() - 4) + ending);
  }
  if (!opt.cluster.empty()) inputs.emplace_back("--cluster", opt.cluster.substr(0, opt.cluster.rfind(':')));
  inputs.emplace_back("--model", opt.model);
  std::error_code ignored;
  if (!opt.init_from.empty() && !begins_from_step)
    for (const auto& file : std::filesystem::recursive_directory_iterator(opt.init_from, ignored))
      inputs.emplace_back("--init-from", file.path().string());
  if (opt.schedule.ends_with(".csv")) inputs.emplace_back("--schedule", opt.schedule);
  for (const auto& [flag, path] : outputs)
    for (const auto& [other, input] : inputs)
      if (!path->empty() && same_file(*path, input))
        plait::fail(fmt::format("{} would overwrite '{}', which {} reads; name another file", flag, *path, other));
  for (const named_folder& saved : saved_folders(opt, begins_from_step)) {
    for (const auto& [flag, path] : outputs)
      if (!path->empty()) check_saved(flag, *path, saved);
    if (opt.export_hf.empty()) continue;
    if (is_within(opt.export_hf, saved.second))
      plait::fail(
          fmt::format("--export-hf names '{}', in {} {}, where training states are kept; name a folder elsewhere",
                      opt.export_hf, saved.first, saved.second));
    if (is_within(saved.second, opt.export_hf))
      plait::fail(fmt::format("{} names '{}', where --export-hf {} makes a new folder at the end; name one elsewhere",
                              saved.first, saved.second, opt.export_hf));
  }
  if (!opt.report.empty() && is_stream(opt.log))
    plait::fail(fmt::format("--report reads --log at the end, and '{}' keeps nothing; name a file", opt.log));
  for (const auto& [flag, path] : outputs) writable(flag, *path);
  for (const auto& [flag, path] : outputs)
    for (const auto& [other, same] : outputs)
      if (flag != other && !path->empty() && !same->empty() && same_file(*path, *same) && !is_stream(*path))
        plait::fail(fmt::format("{} and {} both name '{}'; they need a file each", flag, other, *path));
  if (opt.export_hf.empty()) return;
  plait::atomic_folder(opt.export_hf, "--export-hf");  // can be made, and is gone again
  for (const auto& [flag, path] : outputs)
    if (!path->empty() && is_within(*path, opt.export_hf))
      plait::fail(
          fmt::format("{} names '{}', where --export-hf {} makes a new folder at the end; name a file elsewhere", flag,
                      *path, opt.export_hf));
}
