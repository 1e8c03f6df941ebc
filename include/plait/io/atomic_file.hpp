// Files and folders that appear whole or not at all, and a file that several ranks write at offsets.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/posix_file_system.hpp"

namespace plait {

/// A file that appears under its name complete, or not at all. Bytes go to a temporary file in the target's folder,
/// which `commit` syncs and renames over the target. If destroyed before `commit`, it removes the temporary file.
///
/// An existing target that is not a regular file (`/dev/stdout`, a pipe) is written in place, since a rename would
/// replace the device itself. A symbolic link is followed: its file is replaced, and the link stays.
class atomic_file {
 public:
  /// `field` is the setting that names this file; every error text starts with it. Throws `error` if the path is a
  /// folder, or if its folder does not exist or is not writable.
  atomic_file(const std::string& path, std::string field) : field_(std::move(field)), path_(path) {
    if (path_.empty()) fail({field_, ": the name of the file to write is empty"});
    struct stat status {};
    const bool exists = ::stat(path_.c_str(), &status) == 0;
    if (exists && S_ISDIR(status.st_mode)) fail({field_, ": '", path_, "' is a folder; name a file"});
    if (exists && !S_ISREG(status.st_mode)) {
      descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    } else {
      if (exists) follow_link();
      static std::atomic<unsigned> count{0};
      do {  // a killed process with an equal id (as in a container) may have left this name
        temporary_ = cat({path_, ".tmp-", ::getpid(), "-", count++});
        descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      } while (descriptor_ < 0 && errno == EEXIST);
    }
    if (descriptor_ < 0) {
      temporary_.clear();
      fail_with("cannot write");
    }
  }
  ~atomic_file() { abandon(); }
  atomic_file(const atomic_file&) = delete;
  atomic_file& operator=(const atomic_file&) = delete;

  void write(const void* data, std::size_t bytes) {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = detail::uninterrupted([&] { return ::write(descriptor_, next, bytes); });
      if (written < 0) fail_with("cannot write");
      next += written;
      bytes -= static_cast<std::size_t>(written);
    }
  }
  void write(std::string_view text) { write(text.data(), text.size()); }

  /// Makes the file visible under its name. Call it at most once; no `write` may follow.
  void commit() {
    if (!temporary_.empty() && ::fsync(descriptor_) != 0) fail_with("cannot sync");
    const int closed = ::close(std::exchange(descriptor_, -1));
    if (closed != 0) fail_with("cannot close");
    if (temporary_.empty()) return;
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail_with("cannot rename the finished file to");
    temporary_.clear();
  }

 private:
  void follow_link() {
    if (char* resolved = ::realpath(path_.c_str(), nullptr)) {
      path_ = resolved;
      std::free(resolved);
    }
  }
  [[noreturn]] void fail_with(const char* what) {
    const std::string reason = std::strerror(errno);
    abandon();
    fail({field_, ": ", what, " '", path_, "': ", reason});
  }
  void abandon() {
    if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
    temporary_.clear();
  }

  std::string field_;
  std::string path_;
  std::string temporary_;
  int descriptor_ = -1;
};

/// Writes `contents` to `path` in one step: readers see the old file or the new one, never a part. Throws as
/// `atomic_file`.
inline void write_file_atomically(const std::string& path, std::string_view contents, const std::string& field) {
  atomic_file file(path, field);
  file.write(contents);
  file.commit();
}

/// A file of a known size that several ranks write concurrently at offsets. `field` is the setting that names it; every
/// error text starts with it.
class file_of_parts {
 public:
  /// Makes `path` with `bytes` bytes; one rank calls it. Throws `error` if the path exists or the disk is full.
  static file_of_parts create(const std::string& path, std::uint64_t bytes, const std::string& field) {
    file_of_parts file(path, O_RDWR | O_CREAT | O_EXCL, field);
    int why = bytes == 0 ? 0 : EINTR;
    while (why == EINTR) why = ::posix_fallocate(file.file_->descriptor(), 0, static_cast<off_t>(bytes));
    if (why != 0) fail({field, ": cannot make '", path, "' with ", bytes, " bytes: ", std::strerror(why)});
    return file;
  }
  /// Opens the file that another rank has made.
  static file_of_parts open(const std::string& path, const std::string& field) {
    return file_of_parts(path, O_WRONLY, field);
  }

  void write(std::uint64_t offset, const void* data, std::size_t bytes) {
    naming_field(field_, [&] { file_->write(offset, {static_cast<const std::byte*>(data), bytes}); });
  }
  /// Syncs this rank's bytes and closes the file. Call it at most once; no `write` may follow.
  void close() {
    naming_field(field_, [&] { file_->sync(); });
    file_.reset();
  }

 private:
  file_of_parts(const std::string& path, int flags, const std::string& field)
      : field_(field),
        file_(naming_field(field, [&] { return std::make_unique<detail::posix_file>(path, flags, "open"); })) {}

  std::string field_;
  std::unique_ptr<detail::posix_file> file_;
};

/// A new folder: files go into `temporary()`, in the parent of the new folder, and `commit` renames that. If destroyed
/// before `commit`, it removes the temporary folder. If `commit` cannot rename it, it keeps the name that the error
/// gives.
class atomic_folder {
 public:
  /// `field` is the setting that names this folder; every error text starts with it. Throws `error` if the name exists,
  /// unless it is an empty folder that can be replaced, or a link to one. It also throws if its parent folder does not
  /// exist or is not writable.
  atomic_folder(const std::string& path, std::string field) : field_(std::move(field)), path_(normal(path)) {
    if (path_.empty()) fail({field_, ": the name of the folder to write is empty"});
    const std::filesystem::path name = std::filesystem::path(path_).filename();
    std::error_code error;
    // A rename would replace this process's current folder.
    if (name == "." || name == ".." || std::filesystem::equivalent(path_, ".", error))
      fail({field_, ": '", path, "' is the folder that this runs in, or one above it; name a new one"});
    if (is_taken()) fail({field_, taken_text()});
    if (std::filesystem::is_symlink(path_, error)) {  // a rename would replace the link, not the folder
      path_ = std::filesystem::canonical(path_, error).string();
      if (error) fail({field_, ": cannot follow the link '", path, "': ", error.message()});
    }
    make_temporary();
    if (!std::filesystem::exists(path_, error)) return;
    if (::rename(temporary_.c_str(), path_.c_str()) != 0) {  // a trial rename, before the files are written
      const int why = errno;
      std::filesystem::remove(temporary_, error);
      fail({field_, ": the folder '", path_, "' cannot be replaced (is something mounted on it?): ", std::strerror(why),
            "; name a new folder in it"});
    }
    make_temporary();
  }
  ~atomic_folder() {
    std::error_code ignored;
    if (!temporary_.empty()) std::filesystem::remove_all(temporary_, ignored);
  }
  atomic_folder(const atomic_folder&) = delete;
  atomic_folder& operator=(const atomic_folder&) = delete;

  const std::string& temporary() const { return temporary_; }

  /// Makes the folder visible under its name. Its files must be synced. Call it at most once.
  void commit() {
    naming_field(field_, [&] { machine_files().sync_directory(temporary_); });
    const bool taken = is_taken();
    if (taken || ::rename(temporary_.c_str(), path_.c_str()) != 0) {
      const std::string why = taken ? taken_text() : cat({": cannot make '", path_, "': ", std::strerror(errno)});
      fail({field_, why, "; the finished folder is '", std::exchange(temporary_, {}), "'"});
    }
    temporary_.clear();
    const std::filesystem::path parent = std::filesystem::path(path_).parent_path();
    naming_field(field_, [&] { machine_files().sync_directory(parent.empty() ? "." : parent.string()); });
  }

 private:
  static std::string normal(const std::string& path) {
    const std::filesystem::path plain = std::filesystem::path(path).lexically_normal();
    return (plain.has_filename() ? plain : plain.parent_path()).string();
  }
  /// Whether the name exists and is not an empty folder.
  bool is_taken() const {
    std::error_code ignored;
    const bool empty_folder =
        std::filesystem::is_directory(path_, ignored) && std::filesystem::is_empty(path_, ignored);
    return !empty_folder && std::filesystem::exists(std::filesystem::symlink_status(path_, ignored));
  }
  std::string taken_text() const {
    return cat({": '", path_, "' is there already; name a folder that is not, or is empty"});
  }
  void make_temporary() {
    static std::atomic<unsigned> count{0};
    std::error_code error;
    do {  // ranks on other machines, and killed runs, may have used this process id
      temporary_ = cat({path_, ".tmp-", ::getpid(), "-", count++});
    } while (!std::filesystem::create_directory(temporary_, error) && !error);
    if (error) fail({field_, ": cannot make the folder '", path_, "': ", error.message()});
  }

  std::string field_, path_, temporary_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
