// The steps of a root directory, and how one writer makes and removes them. A step exists whole or not at all. The
// order of operations is tested by a crash test: tests/unit/checkpoint/step_crash.cpp.
#pragma once

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "plait/checkpoint/manifest.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/file_system.hpp"
#include "plait/version.hpp"

namespace plait {

/// A whole step, such as root/step-00000100.
struct committed_step {
  std::uint64_t step = 0;
  std::string path;
  bool is_link = false;  ///< a link to a directory elsewhere, which is read and never removed
};
/// A directory with the name of a step that cannot be loaded, and why.
struct invalid_step {
  std::string path;
  std::string reason;
};
struct step_list {
  std::vector<committed_step> committed;   ///< newest first
  std::vector<invalid_step> invalid;       ///< newest first
  std::vector<directory_entry> leftovers;  ///< paths that a dead or a working writer has left
};

/// Returns the name of a step, such as "step-00000100".
inline std::string step_name(std::uint64_t step) {
  char text[32];
  std::snprintf(text, sizeof text, "step-%08" PRIu64, step);
  return text;
}
/// Returns the step that has this name, or nothing.
inline std::optional<std::uint64_t> step_called(std::string_view name) {
  constexpr std::string_view before = "step-";
  if (!name.starts_with(before)) return std::nullopt;
  std::uint64_t step = 0;
  const auto [end, fault] = std::from_chars(name.data() + before.size(), name.data() + name.size(), step);
  if (fault != std::errc() || end != name.data() + name.size() || name != step_name(step)) return std::nullopt;
  return step;
}
/// Returns a data file's path relative to the step's directory, such as "data/w00017.safetensors".
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

/// Whether a name is a step's name, `mark`, and 32 hexadecimal digits, as `unguessable_suffix` makes them. Files of
/// other names do not come from a writer, and are kept.
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

/// The text of a COMMIT file. It is never parsed: a step is whole if its COMMIT has exactly this text.
inline std::string commit_text(std::uint64_t step, std::string_view manifest) {
  char sum[16];
  std::snprintf(sum, sizeof sum, "%08" PRIx32, crc32c(std::as_bytes(std::span(manifest))));
  return cat({manifest_format, " ", manifest_version, "\nstep ", step, "\n", manifest_file, " ", manifest.size(),
              " bytes, CRC-32C ", sum, "\n"});
}

/// Returns the step that a manifest names; nothing for an invalid manifest.
inline std::optional<std::uint64_t> step_of_manifest(const std::string& text) {
  try {
    return parse_manifest(text, "").step;
  } catch (const error&) {
    return std::nullopt;
  }
}

/// Returns the error text for a step without a COMMIT.
inline std::string uncommitted_text(const std::string& path) {
  return cat(
      {"'", path, "' has no ", commit_file,
       ", which rank 0 writes last: its save was not finished, or the directory is not the one that rank 0 has"});
}

/// Returns the text of a step's manifest. Throws `error` if its COMMIT does not belong to it.
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
  fail({"'", path, "' does not have the name of a step, which is like ", step_name(100),
        "; give a step that was renamed its name back"});
}

/// Returns the directories of a root that have a step's name, and links to directories elsewhere, newest first.
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

/// Returns what is wrong with the COMMIT of a step, or an empty text.
inline std::string commit_fault(file_system& files, const committed_step& step) {
  try {
    committed_manifest(files, step.path, step.step);
    return {};
  } catch (const error& e) {
    return e.what();
  }
}

}  // namespace detail

/// Returns the contents of a root. A step is committed if its COMMIT belongs to its manifest. LATEST is not read.
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

/// Returns the newest committed step of a root, or nothing. It reads no more manifests than necessary. Newer steps that
/// cannot be loaded are added to `invalid_steps`.
inline std::optional<committed_step> newest_step(file_system& files, const std::string& root,
                                                 std::vector<invalid_step>* invalid_steps = nullptr) {
  for (const committed_step& step : detail::steps_by_name(files, files.list(root), root)) {
    std::string fault = detail::commit_fault(files, step);
    if (fault.empty()) return step;
    if (invalid_steps != nullptr) invalid_steps->push_back({step.path, std::move(fault)});
  }
  return std::nullopt;
}

namespace detail {

/// Returns the directory of a step: `path` itself, or the newest whole step in it. Newer steps that cannot be loaded
/// are added to `invalid_steps`. Throws `error` that describes `path` if there is no step.
inline std::string step_path(file_system& files, std::string path, std::vector<invalid_step>& invalid_steps) {
  constexpr std::string_view legal = "; legal are a saved step and a folder of them";
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  // A step is recognised by its name, so "." and links with other names are resolved first.
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
  if (const auto newest = newest_step(files, path, &invalid_steps)) return newest->path;
  if (files.kind_of(path_in(path, manifest_file))) fail(uncommitted_text(path));
  std::string why;
  for (const invalid_step& i : invalid_steps) append(why, {"; '", i.path, "': ", i.reason});
  if (!why.empty()) fail({"'", path, "' has no step that is whole", why});
  fail({"'", path, "' is neither a saved step nor a folder that has one"});
}

}  // namespace detail

/// Returns the newest committed step, in the same root, that is older than the one at `path`; nothing if there is none.
inline std::optional<committed_step> older_step(file_system& files, const std::string& path) {
  try {
    const std::size_t slash = path.rfind('/');
    const std::uint64_t step = detail::step_of_path(path);
    for (const committed_step& other : list_steps(files, slash == path.npos ? "." : path.substr(0, slash)).committed)
      if (other.step < step) return other;
  } catch (const error&) {  // the caller has a more important error to report
  }
  return std::nullopt;
}

/// Reads and checks the manifest of a committed step. Throws `error` that names the path and the fault.
inline manifest read_step(file_system& files, const std::string& path) {
  const std::uint64_t step = detail::step_of_path(path);
  const std::string source = cat({"'", detail::path_in(path, detail::manifest_file), "'"});
  manifest m = parse_manifest(detail::committed_manifest(files, path, step), source);
  if (m.step != step) fail({source, " is that of step ", m.step});
  return m;
}

/// Returns, in words, the first data file of a step that is missing or has another length than in the manifest; empty
/// if there is none. `verify_step` checks the contents.
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

/// Which steps are kept: the newest `last` steps, the steps that `every` divides, and `best`.
struct retention {
  std::uint64_t last = 3;               ///< at least 1
  std::uint64_t every = 0;              ///< 0: none
  std::optional<std::uint64_t> best{};  ///< a step that is kept at any age
};

/// The steps that `step_root::retain` kept and removed.
struct retained {
  std::vector<std::uint64_t> kept, removed;  ///< newest first
  std::string refusal;                       ///< why nothing was removed although something should have been
};

namespace detail {

/// Returns 128 random bits in hexadecimal digits, so that names are unique and cannot be guessed.
inline std::string unguessable_suffix() {
  std::random_device random;
  std::string out;
  for (int i = 0; i < 4; ++i) {
    char digits[9];
    std::snprintf(digits, sizeof digits, "%08x", static_cast<unsigned>(random()));
    out += digits;
  }
  return out;
}

/// Removes a step's directory. It first removes COMMIT and syncs the directory. So after a crash the rest is not a
/// step, whatever its name.
inline void remove_step_tree(file_system& files, const std::string& path) {
  if (const std::string commit = path_in(path, commit_file); files.kind_of(commit)) {
    files.remove_file(commit);
    files.sync_directory(path);
  }
  remove_all(files, path, file_kind::directory);
}

/// Removes the directory of a step that was never committed. It is renamed first, so that ranks which still write to it
/// fail. Files that they create at that moment are removed by further attempts.
inline void remove_unfinished(file_system& files, const std::string& path) {
  const std::string gone = cat({path.substr(0, path.rfind(temporary_mark)), temporary_mark, unguessable_suffix()});
  files.rename(path, gone);
  for (int tries = 4;; --tries) {
    try {
      return remove_step_tree(files, gone);
    } catch (const error&) {
      if (tries == 0) throw;
    }
  }
}

/// The directories that a writer is using: one thread may begin a step while another ends one.
class active_paths {
 public:
  void add(const std::string& path) {
    const std::lock_guard lock(mutex_);
    paths_.insert(path);
  }
  void remove(const std::string& path) {
    const std::lock_guard lock(mutex_);
    paths_.erase(path);
  }
  bool has(const std::string& path) const {
    const std::lock_guard lock(mutex_);
    return paths_.contains(path);
  }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> paths_;
};

}  // namespace detail

/// A step that is being written: a directory with an unguessable name that is not a step's. If destroyed before
/// `commit`, or after an error in it, it removes the directory as far as possible.
class step_in_progress {
 public:
  step_in_progress(step_in_progress&& other) noexcept
      : files_(other.files_),
        root_(std::move(other.root_)),
        step_(other.step_),
        path_(std::exchange(other.path_, {})),
        active_(std::move(other.active_)) {}
  step_in_progress& operator=(step_in_progress&&) = delete;
  ~step_in_progress() { abandon(); }

  std::uint64_t step() const { return step_; }
  /// Returns the directory to write to, which has an empty directory `data`. Writers in other processes need only this.
  const std::string& path() const { return path_; }

  /// Commits the step. Every data file must be written, synced and closed before. It syncs the data directory, and
  /// writes manifest.json and COMMIT, each as a temporary file that is synced and renamed. It syncs and renames the
  /// directory, syncs the root, and writes LATEST. LATEST is only a hint: returns why it could not be written, or an
  /// empty text. If the step could not be committed, throws `error`, and the directory is abandoned.
  std::string commit(const manifest& m) {
    try {
      commit_directory(m);
    } catch (...) {
      abandon();
      throw;
    }
    active_->remove(path_);
    path_.clear();
    try {
      write_whole(*files_, root_, std::string(detail::latest_file), step_name(step_) + "\n");
    } catch (const error& e) {
      return e.what();
    }
    return {};
  }

  /// Abandons the step, and removes its files as far as possible.
  void abandon() noexcept {
    if (path_.empty()) return;
    const std::string path = std::exchange(path_, {});
    try {
      active_->remove(path);
      detail::remove_unfinished(*files_, path);
    } catch (...) {  // the rest has no step's name, and the next writer may remove it
    }
  }

 private:
  friend class step_root;
  step_in_progress(file_system& files, std::string root, std::uint64_t step, std::string path,
                   std::shared_ptr<detail::active_paths> active)
      : files_(&files), root_(std::move(root)), step_(step), path_(std::move(path)), active_(std::move(active)) {
    active_->add(path_);
  }

  void commit_directory(const manifest& m) {
    if (path_.empty()) fail({"step ", step_, " was committed or abandoned before"});
    if (m.step != step_) fail({"the manifest is that of step ", m.step, ", and the directory that of ", step_});
    for (const stored_file& file : m.files) {
      const std::uint64_t bytes = files_->open(detail::path_in(path_, file.path))->size();
      if (bytes != file.bytes)
        fail({"'", detail::path_in(path_, file.path), "' has ", bytes, " bytes, and the manifest says ", file.bytes});
    }
    files_->sync_directory(detail::path_in(path_, "data"));
    const std::string text = manifest_text(m, cat({"'", detail::path_in(path_, detail::manifest_file), "'"}));
    write_whole(*files_, path_, std::string(detail::manifest_file), text);
    write_whole(*files_, path_, std::string(detail::commit_file), detail::commit_text(step_, text));
    const std::string final = detail::path_in(root_, step_name(step_));
    if (files_->kind_of(final)) fail({"'", final, "' has come into being since this step began"});
    files_->rename(path_, final);
    try {
      files_->sync_directory(root_);
    } catch (...) {
      // Whether the disk has the new name is unknown, so nothing may be removed: a directory with that name must be
      // whole.
      const std::string temporary = std::exchange(path_, {});
      active_->remove(temporary);
      try {
        files_->rename(final, temporary);
      } catch (const error&) {  // the first error is the one to report
      }
      throw;
    }
  }

  file_system* files_;
  std::string root_;
  std::uint64_t step_;
  std::string path_;  ///< empty once committed or abandoned
  std::shared_ptr<detail::active_paths> active_;
};

/// The only writer of a root directory. The file system must outlive it and its steps.
class step_root {
 public:
  /// Makes the root, whose parent must exist, and locks it. Throws `error` if another writer has locked it.
  step_root(file_system& files, std::string root) : files_(&files), root_(std::move(root)) {
    while (root_.size() > 1 && root_.ends_with('/')) root_.pop_back();
    if (root_.empty()) fail("the name of the directory for checkpoints is empty");
    const auto kind = files.kind_of(root_);
    if (kind && *kind != file_kind::directory) fail({"'", root_, "' is not a directory"});
    if (!kind) {
      files.make_directory(root_);
      const std::size_t slash = root_.rfind('/');
      files.sync_directory(slash == root_.npos ? "." : root_.substr(0, std::max<std::size_t>(slash, 1)));
    }
    lock_ = files.lock_directory(root_);
  }

  const std::string& path() const { return root_; }

  /// Makes the directory of a new step. Throws `error` if this step or a newer one exists. Loads would take the newer
  /// one, and retention would remove the new step first. An invalid directory with the step's name is renamed to
  /// "step-00000100.damaged-" and digits, so that people can examine it.
  step_in_progress begin(std::uint64_t step) {
    const std::string final = detail::path_in(root_, step_name(step));
    if (files_->kind_of(final)) {
      if (detail::commit_fault(*files_, {step, final}).empty())
        fail({"step ", step, " is in '", root_, "' already; discard it first, or save into another directory"});
      files_->rename(final, cat({final, ".damaged-", detail::unguessable_suffix()}));
      files_->sync_directory(root_);
    }
    if (const auto newest = newest_step(*files_, root_); newest && newest->step > step)
      fail({"step ", newest->step, " in '", root_, "' is newer than step ", step,
            "; discard the newer steps first, or save into another directory"});
    const std::string path = cat({final, detail::temporary_mark, detail::unguessable_suffix()});
    files_->make_directory(path);
    step_in_progress out(*files_, root_, step, path, active_);
    files_->make_directory(detail::path_in(path, "data"));
    return out;
  }

  /// Removes the steps that `keep` does not name, oldest first: renames each into root/.trash, syncs the root, and
  /// deletes it. Removes nothing unless one of the kept steps passes `verified`, which returns what is wrong with a
  /// step, or an empty text. By default it reads the manifest and compares the lengths of the files. If `whole`, an
  /// already verified step, is kept, `verified` is not called. Invalid directories and links to steps elsewhere are
  /// kept.
  retained retain(const retention& keep, const std::function<std::string(const committed_step&)>& verified = {},
                  std::optional<std::uint64_t> whole = std::nullopt) {
    if (keep.last < 1) fail("retention.last is 0; legal is at least 1, the newest step");
    retained out;
    std::vector<committed_step> stay, go;
    for (committed_step& step : list_steps(*files_, root_).committed) {
      const bool kept = stay.size() + go.size() < keep.last || (keep.every != 0 && step.step % keep.every == 0) ||
                        step.step == keep.best || step.is_link;
      (kept ? stay : go).push_back(std::move(step));
    }
    for (const committed_step& step : stay) out.kept.push_back(step.step);
    if (go.empty()) return out;
    const bool known = std::any_of(stay.begin(), stay.end(), [&](const auto& step) { return step.step == whole; });
    for (const committed_step& step : known ? std::vector<committed_step>() : stay) {
      const std::string fault = fault_of(step, verified);
      if (fault.empty()) {
        out.refusal.clear();
        break;
      }
      append(out.refusal, {out.refusal.empty() ? "" : "; ", fault});
    }
    if (!out.refusal.empty()) {
      for (const committed_step& step : go) out.kept.push_back(step.step);
      return out;
    }
    for (std::size_t i = go.size(); i-- > 0;) {
      discard(go[i].step);
      out.removed.insert(out.removed.begin(), go[i].step);
    }
    return out;
  }

  /// Removes a step, or an invalid directory of that name, with all its leftovers. It is renamed into root/.trash, the
  /// root is synced, and the directory is deleted. For a link to a step elsewhere, only the link is removed.
  void discard(std::uint64_t step) {
    for (const directory_entry& entry : files_->list(root_))
      if (entry.name == step_name(step) && entry.kind == file_kind::other)
        return files_->remove_file(detail::path_in(root_, entry.name)), files_->sync_directory(root_);
    const std::string trash = detail::path_in(root_, detail::trash_directory);
    if (!files_->kind_of(trash)) files_->make_directory(trash);
    const std::string gone = cat({trash, "/", step_name(step), "-", detail::unguessable_suffix()});
    files_->rename(detail::path_in(root_, step_name(step)), gone);
    files_->sync_directory(trash);
    files_->sync_directory(root_);
    detail::remove_step_tree(*files_, gone);
  }

  /// Removes temporary directories and trash of dead writers, and returns their paths. Keeps the directories that this
  /// writer uses.
  std::vector<std::string> remove_leftovers() {
    std::vector<std::string> out;
    const std::vector<directory_entry> leftovers = list_steps(*files_, root_).leftovers;
    if (!leftovers.empty()) files_->sync_directory(root_);  // the disk must not keep their old names
    for (const directory_entry& entry : leftovers) {
      if (active_->has(entry.name)) continue;
      const bool in_trash = entry.name.starts_with(detail::path_in(root_, detail::trash_directory) + "/");
      in_trash ? detail::remove_step_tree(*files_, entry.name) : detail::remove_unfinished(*files_, entry.name);
      out.push_back(entry.name);
    }
    return out;
  }

 private:
  std::string fault_of(const committed_step& step,
                       const std::function<std::string(const committed_step&)>& verified) const {
    try {
      return verified ? verified(step) : missing_data(*files_, step.path);
    } catch (const error& e) {
      return e.what();
    }
  }

  file_system* files_;
  std::string root_;
  std::unique_ptr<directory_lock> lock_;
  std::shared_ptr<detail::active_paths> active_ = std::make_shared<detail::active_paths>();
};

/// The outcome of a save.
struct finished_save {
  std::uint64_t step = 0;
  std::string failure{};    ///< empty: the step is committed
  std::uint64_t bytes = 0;  ///< bytes that this rank has written
  double stall = 0;         ///< seconds from the call of `save` until the rank's state was copied
  double background = 0;    ///< seconds from then until the commit on rank 0, or until this rank's file is written
  std::string warning{};    ///< for example: LATEST could not be written, or why no old step was removed; on rank 0
  std::string damage{};     ///< the fault of a committed step that was re-read; on rank 0
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
