// A file that is made with its full size and then written in parts, by offset, by several ranks at once. A file of one
// writer: io/atomic_file.hpp.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait {

/// An open file of which this rank writes parts. `field` is what the user set to name it; every error text starts with
/// it.
class file_of_parts {
 public:
  /// Makes `path` with so many bytes, on one rank. Throws `error` where it is there already or the disk is too full.
  static file_of_parts create(const std::string& path, std::uint64_t bytes, const std::string& field) {
    file_of_parts file(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, field);
    if (bytes == 0) return file;
    int why = 0;
    do why = ::posix_fallocate(file.descriptor_, 0, static_cast<off_t>(bytes));
    while (why == EINTR);
    if (why != 0) fail({field, ": cannot make '", path, "' with ", bytes, " bytes: ", std::strerror(why)});
    return file;
  }
  /// Opens what another rank has made.
  static file_of_parts open(const std::string& path, const std::string& field) {
    return file_of_parts(path, O_WRONLY | O_CLOEXEC, field);
  }
  file_of_parts(file_of_parts&& other) noexcept
      : path_(std::move(other.path_)),
        field_(std::move(other.field_)),
        descriptor_(std::exchange(other.descriptor_, -1)) {}
  file_of_parts& operator=(file_of_parts&&) = delete;
  ~file_of_parts() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  void write(std::uint64_t offset, const void* data, std::size_t bytes) {
    const char* next = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t written = ::pwrite(descriptor_, next, bytes, static_cast<off_t>(offset));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_with("cannot write");
      next += written;
      offset += static_cast<std::uint64_t>(written);
      bytes -= static_cast<std::size_t>(written);
    }
  }
  /// Brings what this rank has written to the disk. At most once, and no `write` after it.
  void close() {
    if (::fsync(descriptor_) != 0) fail_with("cannot sync");
    if (::close(std::exchange(descriptor_, -1)) != 0) fail_with("cannot close");
  }

 private:
  file_of_parts(const std::string& path, int flags, const std::string& field)
      : path_(path), field_(field), descriptor_(::open(path.c_str(), flags, 0666)) {
    if (descriptor_ < 0) fail_with("cannot open");
  }
  [[noreturn]] void fail_with(const char* what) const {
    fail({field_, ": ", what, " '", path_, "': ", std::strerror(errno)});
  }

  std::string path_, field_;
  int descriptor_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
