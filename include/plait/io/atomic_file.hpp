// Writes a file whole or not at all: weights, images, traces.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// A file that appears under its name complete, or not at all: bytes go to a temporary file in the same folder, and
/// `commit` syncs it and renames it over the target. Destroyed before `commit`, it leaves no trace.
///
/// A target that exists and is no regular file (`/dev/stdout`, a pipe) is written in place, since a rename would
/// replace the device itself; a symbolic link is followed, so that the file it names is replaced and the link stays.
class atomic_file {
 public:
  /// `field` is what the user set to name this file; every error text starts with it. Throws `error` when the path is a
  /// folder, its folder does not exist or is not writable.
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
      do {  // a killed process that had the same id, as in a container, may have left one of that name
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
      const ssize_t written = ::write(descriptor_, next, bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_with("cannot write");
      next += written;
      bytes -= static_cast<std::size_t>(written);
    }
  }
  void write(std::string_view text) { write(text.data(), text.size()); }

  /// Makes the file visible under its name. At most once, and no `write` after it.
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

/// Writes `contents` to `path` in one step: readers see the old file or the new one, never a part. Errors as
/// `atomic_file`.
inline void write_file_atomically(const std::string& path, std::string_view contents, const std::string& field) {
  atomic_file file(path, field);
  file.write(contents);
  file.commit();
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
