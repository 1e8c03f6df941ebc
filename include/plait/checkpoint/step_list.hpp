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
  bool is_link = false;  ///< to a directory elsewhere, which is read and never removed
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

/// Whether a name ends in 32 hexadecimal digits, as `unguessable_suffix` makes them, behind a step's name and `mark`.
/// Files of other names are not made by a writer, and stay.
inline bool is_made_by_writer(std::string_view name, std::string_view mark) {
  constexpr std::size_t digits = 32;
  if (name.size() < digits + mark.size()) return false;
  const std::string_view suffix = name.substr(name.size() - digits);
  name.remove_suffix(digits);
  if (suffix.find_first_not_of("0123456789abcdef") != suffix.npos || !name.ends_with(mark)) return false;
  name.remove_suffix(mark.size());
  return step_called(name).has_value();
}

inline std::string path_in(const std::string& directory, std::string_view name) { return cat({directory, "/", name}); }

/// All that a COMMIT says. It is never parsed: a step is whole if its COMMIT is exactly this.
inline std::string commit_text(std::uint64_t step, std::string_view manifest) {
  char sum[16];
  std::snprintf(sum, sizeof sum, "%08" PRIx32, crc32c(std::as_bytes(std::span(manifest))));
  return cat({manifest_format, " ", manifest_version, "\nstep ", step, "\n", manifest_file, " ", manifest.size(),
              " bytes, CRC-32C ", sum, "\n"});
}

/// Returns the step that a manifest says it is of; nothing where it is none.
inline std::optional<std::uint64_t> step_of_manifest(const std::string& text) {
  try {
    return parse_manifest(text, "").step;
  } catch (const error&) {
    return std::nullopt;
  }
}

/// Returns what is wrong with a step that has no COMMIT.
inline std::string uncommitted_text(const std::string& path) {
  return cat(
      {"'", path, "' has no ", commit_file,
       ", which rank 0 writes last: its save was not finished, or the directory is not the one that rank 0 has"});
}

/// Returns the text of a step's manifest after a look at its COMMIT; throws `error` if that does not fit.
inline std::string committed_manifest(file_system& files, const std::string& path, std::uint64_t step) {
  const std::string commit = path_in(path, commit_file), manifest = path_in(path, manifest_file);
  if (!files.kind_of(commit)) fail(uncommitted_text(path));
  if (!files.kind_of(manifest)) fail({"'", path, "' has no ", manifest_file});
  const std::string found = read_whole(files, commit);
  std::string text = read_whole(files, manifest);
  const std::string expected = commit_text(step, text);
  if (found == expected) return text;
  if (const auto other = step_of_manifest(text); other && found == commit_text(*other, text))
    fail({"'", path, "' holds step ", *other, ": it was renamed, or copied; a step is loaded under its own name, ",
          step_name(*other)});
  const auto in_one_line = [](std::string_view lines) {
    std::string line;
    for (const char c : lines.substr(0, 200)) line += c == '\n' ? ';' : c;
    return line;
  };
  fail({"'", commit, "' is not that of its directory and manifest: it reads '", in_one_line(found),
        "', and they take '", in_one_line(expected), "'"});
}

inline std::uint64_t step_of_path(const std::string& path) {
  const std::string_view name = std::string_view(path).substr(path.find_last_of('/') + 1);
  if (const auto step = step_called(name)) return *step;
  fail({"'", path, "' is no step by its name, which would be like ", step_name(100),
        "; give a step that was renamed its name back"});
}

/// Returns the directories of a root that have the name of a step, and links to others, newest first.
inline std::vector<committed_step> steps_by_name(file_system& files, const std::vector<directory_entry>& entries,
                                                 const std::string& root) {
  std::vector<committed_step> out;
  for (const directory_entry& entry : entries) {
    const auto step = step_called(entry.name);
    if (!step) continue;
    const std::string path = path_in(root, entry.name);
    const bool is_link = entry.kind == file_kind::other && files.kind_of(path) == file_kind::directory;
    if (is_link || entry.kind == file_kind::directory) out.push_back({*step, path, is_link});
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
  for (committed_step& step : detail::steps_by_name(files, entries, root)) {
    std::string fault = detail::commit_fault(files, step);
    if (fault.empty())
      out.committed.push_back(std::move(step));
    else
      out.invalid.push_back({std::move(step.path), std::move(fault)});
  }
  for (const directory_entry& entry : entries) {
    const std::string path = detail::path_in(root, entry.name);
    if (entry.name == detail::trash_directory && entry.kind == file_kind::directory) {
      for (const directory_entry& gone : files.list(path))
        if (gone.kind == file_kind::directory && detail::is_made_by_writer(gone.name, "-"))
          out.leftovers.push_back({detail::path_in(path, gone.name), gone.kind});
    } else if (entry.kind == file_kind::directory && detail::is_made_by_writer(entry.name, detail::temporary_mark)) {
      out.leftovers.push_back({path, entry.kind});
    }
  }
  return out;
}

/// Returns the newest committed step of a root, if there is one; reads no more manifests than it needs. Newer ones that
/// cannot be loaded are added to `passed_over`.
inline std::optional<committed_step> newest_step(file_system& files, const std::string& root,
                                                 std::vector<invalid_step>* passed_over = nullptr) {
  for (const committed_step& step : detail::steps_by_name(files, files.list(root), root)) {
    std::string fault = detail::commit_fault(files, step);
    if (fault.empty()) return step;
    if (passed_over != nullptr) passed_over->push_back({step.path, std::move(fault)});
  }
  return std::nullopt;
}

namespace detail {

/// Returns the directory of a step: `path` itself, or the newest one in it that is whole, newer ones being added to
/// `passed_over`. Throws `error` that says what is there instead.
inline std::string step_path(file_system& files, std::string path, std::vector<invalid_step>& passed_over) {
  constexpr std::string_view legal = "; legal are a saved step and a folder of them";
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  // A step's name says which it is: "." and links that have another are followed.
  const auto has_name = [](std::string_view of) {
    return step_called(of.substr(of.find_last_of('/') + 1)).has_value();
  };
  if (!has_name(path) && files.kind_of(path_in(path, commit_file)))
    if (std::string real = files.resolved(path); has_name(real)) path = std::move(real);
  const auto kind = files.kind_of(path);
  if (!kind) {
    const std::size_t slash = path.rfind('/');
    const std::string name = path.substr(slash == path.npos ? 0 : slash + 1);
    const std::string folder = slash == path.npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
    std::string others;
    if (step_called(name) && files.kind_of(folder) == file_kind::directory)
      for (const committed_step& step : steps_by_name(files, files.list(folder), folder))
        append(others, {others.empty() ? "; there are " : ", ", step_name(step.step)});
    fail({"there is no '", path, "'", others.empty() ? std::string(legal) : others});
  }
  if (kind != file_kind::directory) fail({"'", path, "' is a file", legal});
  if (files.kind_of(path_in(path, commit_file))) return path;
  if (const auto newest = newest_step(files, path, &passed_over)) return newest->path;
  if (files.kind_of(path_in(path, manifest_file))) fail(uncommitted_text(path));
  std::string why;
  for (const invalid_step& i : passed_over) append(why, {"; '", i.path, "': ", i.reason});
  if (!why.empty()) fail({"'", path, "' has no step that is whole", why});
  fail({"'", path, "' is no saved step, and no folder that has one"});
}

}  // namespace detail

/// Returns the newest committed step that is older than the one at `path`, in the same root; nothing where there is
/// none, or nothing can be seen.
inline std::optional<committed_step> older_step(file_system& files, const std::string& path) {
  try {
    const std::size_t slash = path.rfind('/');
    const std::uint64_t step = detail::step_of_path(path);
    for (const committed_step& other : list_steps(files, slash == path.npos ? "." : path.substr(0, slash)).committed)
      if (other.step < step) return other;
  } catch (const error&) {  // the caller has worse to tell
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
