// Writes steps as directories that exist whole or not at all, in a root directory with one writer at a time. What is
// in their data files is the caller's: checkpoint/safetensors_stream.hpp. To read: checkpoint/step_list.hpp. The order
// of operations and its crash test: tests/unit/checkpoint/step_crash.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/step_list.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

/// Which steps are kept: the newest `last` of them, those that `every` divides, and `best`.
struct retention {
  std::uint64_t last = 3;               ///< at least 1
  std::uint64_t every = 0;              ///< 0: none for this reason
  std::optional<std::uint64_t> best{};  ///< a step that is kept whatever its age
};

/// The steps that `step_root::retain` kept and removed.
struct retained {
  std::vector<std::uint64_t> kept, removed;  ///< newest first
  std::string refusal;                       ///< why nothing was removed although something should have been
};

namespace detail {

/// 128 random bits in hexadecimal digits, so that nobody finds or meets a directory by its name.
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

/// Removes a step's directory. Its COMMIT goes first, and that is on the disk before anything else goes: whatever name
/// the directory has after a crash, what is left of it is no step.
inline void remove_step_tree(file_system& files, const std::string& path) {
  if (const std::string commit = path_in(path, commit_file); files.kind_of(commit)) {
    files.remove_file(commit);
    files.sync_directory(path);
  }
  remove_all(files, path, file_kind::directory);
}

/// Removes the directory of a step that never was one. It gets another name first, so that ranks which still write by
/// the one that they know fail; what they are making in it at that moment goes with another try.
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

/// The directories that a writer is at work on: one thread may begin a step while another ends one.
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

/// A step that is being written: a directory with an unguessable name that nothing takes for a step. Destroyed before
/// `commit`, or after an error in it, it removes the directory as well as it can.
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
  /// Returns the directory to write into; it has an empty directory `data`. Writers in other processes need only this.
  const std::string& path() const { return path_; }
  /// Returns the full path of a writer's data file.
  std::string data_path(std::uint32_t writer) const { return detail::path_in(path_, data_file_name(writer)); }

  /// Makes the step exist. Every data file is written, synced and closed before. In this order: sync of the data
  /// directory; manifest.json and COMMIT, each as a temporary file that is synced and renamed; sync and rename of the
  /// directory; sync of the root; LATEST. Returns why LATEST, which is but a hint, could not be written, or nothing.
  /// Throws `error` if the step does not exist then, and the directory is abandoned.
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

  /// Gives the step up: removes what there is of it, as well as that works.
  void abandon() noexcept {
    if (path_.empty()) return;
    const std::string path = std::exchange(path_, {});
    try {
      active_->remove(path);
      detail::remove_unfinished(*files_, path);
    } catch (...) {  // what is left has no step's name, and the next writer may remove it
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
      // Whether the disk has the new name is unknown. Nothing may be removed then: what has the name must be whole.
      const std::string temporary = std::exchange(path_, {});
      active_->remove(temporary);
      try {
        files_->rename(final, temporary);
      } catch (const error&) {  // the first error is the one to tell
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

/// The one writer of a root directory. The file system outlives it and its steps.
class step_root {
 public:
  /// Makes the root if only that is missing, and locks it. Throws `error` if another writer has it.
  step_root(file_system& files, std::string root) : files_(&files), root_(std::move(root)) {
    while (root_.size() > 1 && root_.ends_with('/')) root_.pop_back();
    if (root_.empty()) fail("the name of the directory for checkpoints is empty");
    const auto kind = files.kind_of(root_);
    if (kind && *kind != file_kind::directory) fail({"'", root_, "' is no directory"});
    if (!kind) {
      files.make_directory(root_);
      const std::size_t slash = root_.rfind('/');
      files.sync_directory(slash == root_.npos ? "." : root_.substr(0, std::max<std::size_t>(slash, 1)));
    }
    lock_ = files.lock_directory(root_);
  }

  const std::string& path() const { return root_; }

  /// Makes the directory of a step that is to be written. Throws `error` if the step is there already, or a newer one:
  /// that would be loaded in its place, and retention would remove it first. A directory that has its name and is no
  /// whole step is put aside, as "step-00000100.damaged-" and digits, for people to look at.
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

  /// Removes what `keep` does not name, oldest first: renamed into root/.trash, root synced, deleted. Removes nothing
  /// unless one of the steps that stay is `verified`, which returns what is wrong with a step, or nothing; by default
  /// its manifest is read and the lengths of its files are looked at. None is asked for if `whole` stays, a step that
  /// was verified before. Invalid directories stay, and links to steps elsewhere.
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

  /// Removes a step, or an invalid directory of that name, whatever is left then: renamed into root/.trash, root
  /// synced, deleted. Of a link to a step elsewhere, the link alone.
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

  /// Removes what writers that are dead have left, temporary directories and trash, and returns their paths. What this
  /// writer is at work on stays.
  std::vector<std::string> remove_leftovers() {
    std::vector<std::string> out;
    const std::vector<directory_entry> leftovers = list_steps(*files_, root_).leftovers;
    if (!leftovers.empty()) files_->sync_directory(root_);  // so that none has a step's name on the disk still
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

}  // namespace plait

#include "plait/core/macros_on.hpp"
