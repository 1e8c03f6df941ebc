// Which steps a root directory holds, and what makes one of them whole: a COMMIT that is that of its manifest. Reading
// only, with no lock: checkpoint/step_directory.hpp writes. What is in the data files: checkpoint/verify.hpp.
#pragma once

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/checkpoint/manifest_json.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// root/step-00000100: a step that is whole.
struct committed_step {
  std::uint64_t step = 0;
  std::string path;
};
/// A directory with the name of a step that cannot be loaded, and why.
struct invalid_step {
  std::string path;
  std::string reason;
};
struct step_list {
  std::vector<committed_step> committed;   ///< newest first
  std::vector<invalid_step> invalid;       ///< newest first
  std::vector<directory_entry> leftovers;  ///< paths of what a dead writer, or one at work, has left
};

/// Returns "step-00000100".
inline std::string step_name(std::uint64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "step-%08" PRIu64, step);
  return text;
}
/// Returns the step that has this name, if it is one.
inline std::optional<std::uint64_t> step_called(std::string_view name) {
  constexpr std::string_view before = "step-";
  if (!name.starts_with(before)) return std::nullopt;
  std::uint64_t step = 0;
  const auto [end, fault] = std::from_chars(name.data() + before.size(), name.data() + name.size(), step);
  if (fault != std::errc() || end != name.data() + name.size() || name != step_name(step)) return std::nullopt;
  return step;
}
/// Returns "data/w00017.safetensors", which is relative to the step's directory.
inline std::string data_file_name(std::uint32_t writer) {
  char text[40];
  std::snprintf(text, sizeof text, "data/w%05" PRIu32 ".safetensors", writer);
  return text;
}

namespace detail {

inline constexpr std::string_view manifest_file = "manifest.json";
inline constexpr std::string_view commit_file = "COMMIT";
inline constexpr std::string_view latest_file = "LATEST";
inline constexpr std::string_view trash_directory = ".trash";
inline constexpr std::string_view temporary_mark = ".tmp-";

inline std::string path_in(const std::string& directory, std::string_view name) { return cat({directory, "/", name}); }

/// All that a COMMIT says. It is never parsed: a step is whole if its COMMIT is exactly this.
inline std::string commit_text(std::uint64_t step, std::string_view manifest) {
  char sum[16];
  std::snprintf(sum, sizeof sum, "%08" PRIx32, crc32c(std::as_bytes(std::span(manifest))));
  return cat({manifest_format, " ", manifest_version, "\nstep ", step, "\n", manifest_file, " ", manifest.size(),
              " bytes, CRC-32C ", sum, "\n"});
}

/// Returns the text of a step's manifest after a look at its COMMIT; throws `error` if that does not fit.
inline std::string committed_manifest(file_system& files, const std::string& path, std::uint64_t step) {
  const std::string commit = path_in(path, commit_file), manifest = path_in(path, manifest_file);
  if (!files.kind_of(commit)) fail({"'", path, "' has no ", commit_file, ": it was never finished"});
  if (!files.kind_of(manifest)) fail({"'", path, "' has no ", manifest_file});
  const std::string found = read_whole(files, commit);
  std::string text = read_whole(files, manifest);
  const std::string expected = commit_text(step, text);
  if (found != expected) {
    fail({"'", commit, "' is not that of its directory and manifest: it reads '",
          std::string_view(found).substr(0, 200), "', and they take '", expected, "'"});
  }
  return text;
}

inline std::uint64_t step_of_path(const std::string& path) {
  const std::string_view name = std::string_view(path).substr(path.find_last_of('/') + 1);
  if (const auto step = step_called(name)) return *step;
  fail({"'", path, "' is no step of a checkpoint; its name would be like ", step_name(100)});
}

/// Returns the directories of a root that have the name of a step, newest first.
inline std::vector<committed_step> steps_by_name(const std::vector<directory_entry>& entries, const std::string& root) {
  std::vector<committed_step> out;
  for (const directory_entry& entry : entries) {
    const auto step = step_called(entry.name);
    if (step && entry.kind == file_kind::directory) out.push_back({*step, path_in(root, entry.name)});
  }
  std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.step > b.step; });
  return out;
}

/// Returns what is wrong with the COMMIT of a step, or nothing.
inline std::string commit_fault(file_system& files, const committed_step& step) {
  try {
    committed_manifest(files, step.path, step.step);
    return {};
  } catch (const error& e) {
    return e.what();
  }
}

}  // namespace detail

/// Returns what is in a root; a step is committed if its COMMIT is that of its manifest. LATEST is not looked at.
inline step_list list_steps(file_system& files, const std::string& root) {
  step_list out;
  const std::vector<directory_entry> entries = files.list(root);
  for (committed_step& step : detail::steps_by_name(entries, root)) {
    std::string fault = detail::commit_fault(files, step);
    if (fault.empty())
      out.committed.push_back(std::move(step));
    else
      out.invalid.push_back({std::move(step.path), std::move(fault)});
  }
  for (const directory_entry& entry : entries) {
    const std::string path = detail::path_in(root, entry.name);
    const std::size_t mark = entry.name.find(detail::temporary_mark);
    if (entry.name == detail::trash_directory && entry.kind == file_kind::directory) {
      for (const directory_entry& gone : files.list(path))
        out.leftovers.push_back({detail::path_in(path, gone.name), gone.kind});
    } else if (mark != entry.name.npos && step_called(std::string_view(entry.name).substr(0, mark)) &&
               entry.kind == file_kind::directory) {
      out.leftovers.push_back({path, entry.kind});
    }
  }
  return out;
}

/// Returns the newest committed step of a root, if there is one; reads no more manifests than it needs. Newer ones that
/// cannot be loaded are added to `passed_over`.
inline std::optional<committed_step> newest_step(file_system& files, const std::string& root,
                                                 std::vector<invalid_step>* passed_over = nullptr) {
  for (const committed_step& step : detail::steps_by_name(files.list(root), root)) {
    std::string fault = detail::commit_fault(files, step);
    if (fault.empty()) return step;
    if (passed_over != nullptr) passed_over->push_back({step.path, std::move(fault)});
  }
  return std::nullopt;
}

/// Reads and checks the manifest of a committed step. Throws `error` naming the path and what is wrong.
inline manifest read_step(file_system& files, const std::string& path) {
  const std::uint64_t step = detail::step_of_path(path);
  const std::string source = cat({"'", detail::path_in(path, detail::manifest_file), "'"});
  manifest m = parse_manifest(detail::committed_manifest(files, path, step), source);
  if (m.step != step) fail({source, " is that of step ", m.step});
  return m;
}

/// Returns the first data file of a step that is missing or of another length than its manifest says, in words; nothing
/// if there is none. What is in them is checked by `verify_step`.
inline std::string missing_data(file_system& files, const std::string& path, const manifest& saved) {
  for (const stored_file& file : saved.files) {
    const std::string full = detail::path_in(path, file.path);
    if (!files.kind_of(full)) return cat({"'", full, "' is missing"});
    const std::uint64_t bytes = files.open(full)->size();
    if (bytes != file.bytes) return cat({"'", full, "' has ", bytes, " bytes, and the manifest says ", file.bytes});
  }
  return {};
}
inline std::string missing_data(file_system& files, const std::string& path) {
  return missing_data(files, path, read_step(files, path));
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
