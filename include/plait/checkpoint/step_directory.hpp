// Steps as directories that exist whole or not at all, in a root directory with one writer at a time. What is in their
// files is the caller's: checkpoint/manifest.hpp. The order of operations and its crash test:
// tests/unit/checkpoint/step_crash.cpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "plait/checkpoint/manifest_json.hpp"
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
  std::vector<committed_step> committed;  ///< newest first
  std::vector<invalid_step> invalid;      ///< newest first
  std::vector<std::string> leftovers;     ///< paths that a dead writer, or one at work, has left
};

/// Returns "step-00000100".
inline std::string step_name(std::uint64_t step);
/// Returns "data/w00017.safetensors", which is relative to the step's directory.
inline std::string data_file_name(std::uint32_t writer);

/// Returns what is in a root; a step is committed if its COMMIT is that of its manifest. LATEST is not looked at.
inline step_list list_steps(file_system& files, const std::string& root);
/// Returns the newest committed step of a root, if there is one; reads no more manifests than it needs.
inline std::optional<committed_step> newest_step(file_system& files, const std::string& root);
/// Reads and checks the manifest of a committed step. Throws `error` naming the path and what is wrong.
inline manifest read_step(file_system& files, const std::string& path);

/// Which steps are kept: the newest `last` of them, those that `every` divides, and `best`.
struct retention {
  std::uint64_t last = 3;             ///< at least 1
  std::uint64_t every = 0;            ///< 0: none for this reason
  std::optional<std::uint64_t> best;  ///< a step that is kept whatever its age
};

/// What `step_root::retain` did.
struct retained {
  std::vector<std::uint64_t> kept, removed;  ///< newest first
  std::string refusal;                       ///< why nothing was removed although something should have been
};

/// A step that is being written: a directory with an unguessable name that nothing takes for a step. Destroyed before
/// `commit`, or after an error, it removes the directory as well as it can.
class step_in_progress {
 public:
  std::uint64_t step() const;
  /// Returns the directory to write into; it has an empty directory `data`. Writers in other processes need only this.
  const std::string& path() const;
  /// Returns the full path of a writer's data file.
  std::string data_path(std::uint32_t writer) const;
  /// Makes the step exist. Every data file is written, synced and closed before. In this order: sync of the data
  /// directory; manifest.json and COMMIT, each as a temporary file that is synced and renamed; sync and rename of the
  /// directory; sync of the root; LATEST. Returns why LATEST, which is but a hint, could not be written, or nothing.
  /// Throws `error` if the step does not exist then, and the directory is abandoned.
  std::string commit(const manifest& m);
  void abandon() noexcept;
};

/// The one writer of a root directory.
class step_root {
 public:
  /// Makes the root if only that is missing, and locks it. Throws `error` if another writer has it.
  step_root(file_system& files, std::string root);

  /// Throws `error` if the step is committed already.
  step_in_progress begin(std::uint64_t step);
  /// Removes what `keep` does not name, oldest first: renamed into root/.trash, root synced, deleted. Removes nothing
  /// unless one of the steps that stay is `verified`, which returns what is wrong with a step or nothing; by default
  /// its COMMIT and the lengths of its files are looked at. Invalid directories stay.
  retained retain(const retention& keep, const std::function<std::string(const committed_step&)>& verified = {});
  /// Removes a step, or an invalid directory of that name, the way `retain` does.
  void discard(std::uint64_t step);
  /// Removes what writers that are dead have left: temporary directories and trash. Nothing that this one is at work
  /// on.
  void remove_leftovers();
};

}  // namespace plait
