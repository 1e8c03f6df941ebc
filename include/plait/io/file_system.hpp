// The file operations that saves and loads need, as an abstract class, so that tests can simulate a crash between any
// two of them. io/posix_file_system.hpp implements it for the machine's files.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// Throws the `error` of a file operation, such as "cannot sync '/a/b': Input/output error".
[[noreturn]] inline void fail_file(std::string_view operation, const std::string& path, int system_error) {
  fail({"cannot ", operation, " '", path, "': ", std::strerror(system_error)});
}

/// Calls `work` for a file that the setting `field` names. The text of an `error` from it gets `field` as its
/// beginning.
template <class Work>
auto naming_field(const std::string& field, Work&& work) {
  try {
    return work();
  } catch (const error& e) {
    fail({field, ": ", e.what()});
  }
}

/// An open file. Several threads may call `write` and `read` at once, for ranges that do not overlap. Only one thread
/// at a time may start writes. The destructor closes the file; bytes that were not synced may be lost.
class open_file {
 public:
  virtual ~open_file() = default;

  /// Writes all of `bytes` at `offset`, in as many system calls as necessary.
  void write(std::uint64_t offset, std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::size_t written = write_some(offset, bytes);
      if (written == 0) fail({"cannot write '", path_, "': the system took none of ", bytes.size(), " bytes"});
      offset += written;
      bytes = bytes.subspan(written);
    }
  }
  /// Starts to write all of `bytes`, which must not change until `finish_writes`, `sync` or the destructor has
  /// returned. The system may write them in the background. One of the next calls throws the error of a failed write.
  virtual void start_write(std::uint64_t offset, std::span<const std::byte> bytes) { write(offset, bytes); }
  /// Waits for all started writes.
  virtual void finish_writes() {}
  /// Fills `bytes` from `offset` on. Throws `error` if the file ends before.
  void read(std::uint64_t offset, std::span<std::byte> bytes) const {
    const std::uint64_t end = offset + bytes.size();
    while (!bytes.empty()) {
      const std::size_t got = read_some(offset, bytes);
      if (got == 0)
        fail({"'", path_, "' is truncated: it ends at byte ", std::min(offset, size()), " and should have ", end});
      offset += got;
      bytes = bytes.subspan(got);
    }
  }
  /// Returns the length of the file in bytes.
  virtual std::uint64_t size() const = 0;
  /// Returns when all written bytes are on the disk, including those of started writes. After a failed sync every call
  /// throws, because data may be lost although a second sync succeeds.
  void sync() {
    if (sync_failed_) fail({"cannot sync '", path_, "': a sync of it failed before, and its data may be lost"});
    sync_failed_ = true;
    finish_writes();
    sync_once();
    sync_failed_ = false;
  }
  /// Returns the system's file descriptor, for interfaces such as io_uring; -1 if there is none.
  virtual int descriptor() const { return -1; }
  const std::string& path() const { return path_; }

 protected:
  explicit open_file(std::string path) : path_(std::move(path)) {}
  open_file(const open_file&) = delete;
  open_file& operator=(const open_file&) = delete;

  /// Writes at least one byte, and returns how many it has written. Throws with `fail_file`.
  virtual std::size_t write_some(std::uint64_t offset, std::span<const std::byte> bytes) = 0;
  /// Reads some bytes, and returns how many; 0 at the end of the file. Throws with `fail_file`.
  virtual std::size_t read_some(std::uint64_t offset, std::span<std::byte> bytes) const = 0;
  virtual void sync_once() = 0;

 private:
  std::string path_;
  bool sync_failed_ = false;
};

/// A lock that excludes other writers of a directory. It is released when destroyed, or when the process ends.
class directory_lock {
 public:
  virtual ~directory_lock() = default;
};

enum class file_kind : std::uint8_t { regular, directory, other };

struct directory_entry {
  std::string name;
  file_kind kind = file_kind::regular;
  friend bool operator==(const directory_entry&, const directory_entry&) = default;
};

/// Every operation succeeds, or throws `error` with the operation, the path and the system's reason. Only a sync
/// guarantees that changes are on the disk: `open_file::sync` for the bytes of a file, `sync_directory` of its
/// directory for its name.
class file_system {
 public:
  virtual ~file_system() = default;

  /// Creates a file for writing and reading; it must not exist.
  virtual std::unique_ptr<open_file> create(const std::string& path) = 0;
  /// Opens a regular file for reading.
  virtual std::unique_ptr<open_file> open(const std::string& path) = 0;
  /// Returns the kind of file at this path (following symbolic links), or nothing if it does not exist.
  virtual std::optional<file_kind> kind_of(const std::string& path) = 0;
  /// Returns the path without symbolic links, "." and "..". A file system without links returns the path itself.
  virtual std::string resolved(const std::string& path) { return path; }
  /// Returns the entries of a directory, sorted by name, without "." and "..".
  virtual std::vector<directory_entry> list(const std::string& path) = 0;
  /// Makes a directory, which must not exist; its parent must.
  virtual void make_directory(const std::string& path) = 0;
  /// Renames a file or directory within its disk, atomically. A file replaces an existing file; a directory replaces
  /// only an empty one.
  virtual void rename(const std::string& from, const std::string& to) = 0;
  virtual void remove_file(const std::string& path) = 0;
  /// Removes an empty directory.
  virtual void remove_directory(const std::string& path) = 0;
  /// Returns when the names of a directory's entries are on the disk.
  virtual void sync_directory(const std::string& path) = 0;
  /// Locks a directory by a file `.lock` in it. Throws `error` at once if another writer has locked it.
  virtual std::unique_ptr<directory_lock> lock_directory(const std::string& path) = 0;
};

/// Returns the bytes of a whole file. Throws `error` if it has more than `most` bytes; a manifest of a million boxes
/// has a tenth of the default.
inline std::string read_whole(file_system& files, const std::string& path,
                              std::uint64_t most = std::uint64_t{1} << 30) {
  const auto file = files.open(path);
  const std::uint64_t size = file->size();
  if (size > most)
    fail({"'", path, "' has ", size, " bytes, too many for a text of this kind; legal are up to ", most});
  std::string text(size, '\0');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Writes a file atomically: writes and syncs `name`.tmp, renames it to `name`, and syncs the directory. It replaces a
/// `name`.tmp that a dead writer has left. Only for the single writer of a directory.
inline void write_whole(file_system& files, const std::string& directory, const std::string& name,
                        std::string_view contents) {
  const std::string path = directory + "/" + name, temporary = path + ".tmp";
  if (files.kind_of(temporary)) files.remove_file(temporary);
  {
    const auto file = files.create(temporary);
    file->write(0, std::as_bytes(std::span(contents)));
    file->sync();
  }
  files.rename(temporary, path);
  files.sync_directory(directory);
}

/// Removes a file, or a directory with its contents. A symbolic link is removed, not followed.
inline void remove_all(file_system& files, const std::string& path, file_kind kind) {
  if (kind != file_kind::directory) return files.remove_file(path);
  for (const directory_entry& entry : files.list(path)) remove_all(files, path + "/" + entry.name, entry.kind);
  files.remove_directory(path);
}

/// A cache of open files, for one thread at a time.
class open_files {
 public:
  /// The most files that it keeps open.
  static constexpr std::size_t most = 64;

  open_files(file_system& files, std::vector<std::string> paths)
      : files_(files), paths_(std::move(paths)), open_(paths_.size()) {}

  /// Returns the i-th file, which stays open until `most` other files have been requested. Throws as
  /// `file_system::open`.
  const open_file& at(std::size_t i) { return *hold(i); }
  /// Returns the i-th file, which stays open as long as the result lives. Other threads may read from it.
  std::shared_ptr<const open_file> hold(std::size_t i) {
    if (open_[i]) return open_[i];
    open_[i] = files_.open(paths_[i]);
    order_.push_back(i);
    if (order_.size() > most) {
      open_[order_.front()].reset();
      order_.pop_front();
    }
    return open_[i];
  }

 private:
  file_system& files_;
  std::vector<std::string> paths_;
  std::vector<std::shared_ptr<const open_file>> open_;
  std::deque<std::size_t> order_;  ///< the open files, oldest first
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
