// The file operations of io/file_system.hpp by the system's calls. Interrupted calls go on; everything else that fails
// is an error. Files themselves: io/posix_file.hpp. Writes that overlap with other work: io/uring_file_system.hpp.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"
#include "plait/io/posix_file.hpp"

namespace plait {

namespace detail {

/// Returns the name of this machine; empty where the system does not say.
inline std::string host_name() {
  char name[256] = "";
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

class posix_lock final : public directory_lock {
 public:
  explicit posix_lock(const std::string& directory)
      : descriptor_(directory + "/.lock", O_RDWR | O_CREAT | O_NONBLOCK | O_NOFOLLOW, "lock") {
    descriptor_.require_regular(directory + "/.lock");
    if (uninterrupted([&] { return ::flock(descriptor_.value(), LOCK_EX | LOCK_NB); }) == 0) {
      note_owner();
      return;
    }
    if (errno != EWOULDBLOCK) fail_file("lock", directory, errno);
    fail({"cannot lock '", directory, "': another writer, ", owner(),
          ", is at work in it; give each its own directory"});
  }

 private:
  // Who has the lock, for the message of the next; the lock itself does not depend on it.
  void note_owner() const {
    const std::string text = cat({"process ", static_cast<std::int64_t>(::getpid()), " on ", host_name(), "\n"});
    if (::ftruncate(descriptor_.value(), 0) != 0) return;
    [[maybe_unused]] const ssize_t written = ::pwrite(descriptor_.value(), text.data(), text.size(), 0);
  }
  std::string owner() const {
    char text[300];
    const ssize_t got = ::pread(descriptor_.value(), text, sizeof text, 0);
    const std::string all(text, got > 0 ? static_cast<std::size_t>(got) : 0);
    const std::string line = all.substr(0, all.find('\n'));
    return line.empty() ? "of unknown process" : line;
  }

  posix_descriptor descriptor_;
};

}  // namespace detail

/// The files of this machine. It has no state: any number of objects and threads may work at once. A lock is one of the
/// system (flock), so it goes with the process that holds it, however that ends.
class posix_file_system : public file_system {
 public:
  std::unique_ptr<open_file> create(const std::string& path) override {
    return std::make_unique<detail::posix_file>(path, O_RDWR | O_CREAT | O_EXCL, "create");
  }
  std::unique_ptr<open_file> open(const std::string& path) override {
    return std::make_unique<detail::posix_file>(path, O_RDONLY | O_NONBLOCK, "open");
  }
  std::optional<file_kind> kind_of(const std::string& path) override {
    struct stat status {};
    if (::stat(path.c_str(), &status) == 0) return kind_of_mode(status.st_mode);
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    fail_file("examine", path, errno);
  }
  std::vector<directory_entry> list(const std::string& path) override {
    struct closer {
      void operator()(DIR* directory) const { ::closedir(directory); }
    };
    const std::unique_ptr<DIR, closer> directory(::opendir(path.c_str()));
    if (!directory) fail_file("list", path, errno);
    std::vector<directory_entry> out;
    for (;;) {
      errno = 0;
      const struct dirent* entry = ::readdir(directory.get());
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name == "." || name == "..") continue;
      struct stat status {};
      if (::fstatat(::dirfd(directory.get()), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT) continue;  // removed since
        fail_file("examine", path + "/" + name, errno);
      }
      out.push_back({name, kind_of_mode(status.st_mode)});
    }
    if (errno != 0) fail_file("list", path, errno);
    std::sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.name < b.name; });
    return out;
  }
  std::string resolved(const std::string& path) override {
    const std::unique_ptr<char, void (*)(void*)> real(::realpath(path.c_str(), nullptr), std::free);
    if (!real) fail_file("resolve", path, errno);
    return real.get();
  }
  void make_directory(const std::string& path) override {
    if (::mkdir(path.c_str(), 0777) != 0) fail_file("make the directory", path, errno);
  }
  void rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) fail_file("rename", from + "' to '" + to, errno);
  }
  void remove_file(const std::string& path) override {
    if (::unlink(path.c_str()) != 0) fail_file("remove", path, errno);
  }
  void remove_directory(const std::string& path) override {
    if (::rmdir(path.c_str()) != 0) fail_file("remove the directory", path, errno);
  }
  void sync_directory(const std::string& path) override {
    const detail::posix_descriptor directory(path, O_RDONLY | O_DIRECTORY, "sync the directory");
    if (::fsync(directory.value()) != 0) fail_file("sync the directory", path, errno);
  }
  std::unique_ptr<directory_lock> lock_directory(const std::string& path) override {
    return std::make_unique<detail::posix_lock>(path);
  }

 private:
  static file_kind kind_of_mode(mode_t mode) {
    return S_ISREG(mode) ? file_kind::regular : S_ISDIR(mode) ? file_kind::directory : file_kind::other;
  }
};

/// Returns the files of this machine, for whoever was given no others.
inline file_system& machine_files() {
  static posix_file_system files;
  return files;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
