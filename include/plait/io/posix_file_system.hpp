// The file operations of io/file_system.hpp by the system's calls: large blocks go past the page cache where the disk
// takes them, and several large writes are under way at once.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"

namespace plait {

namespace detail {

/// Calls until the call is not interrupted.
template <class Call>
auto uninterrupted(Call&& call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

/// A descriptor that is closed when destroyed. It is none of the first three, where a program prints.
class posix_descriptor {
 public:
  posix_descriptor(const std::string& path, int flags, const char* operation)
      : value_(uninterrupted([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); })) {
    if (value_ >= 0 && value_ <= 2) {
      const int higher = ::fcntl(value_, F_DUPFD_CLOEXEC, 3);
      ::close(std::exchange(value_, higher));
    }
    if (value_ < 0) fail_file(operation, path, errno);
  }
  ~posix_descriptor() { ::close(value_); }
  posix_descriptor(const posix_descriptor&) = delete;
  posix_descriptor& operator=(const posix_descriptor&) = delete;
  int value() const { return value_; }

  /// Refuses what is no regular file, before a read or a map of it waits forever.
  void require_regular(const std::string& path) const {
    struct stat status {};
    if (::fstat(value_, &status) != 0) fail_file("examine", path, errno);
    if (S_ISDIR(status.st_mode)) fail({"cannot open '", path, "': it is a folder"});
    if (!S_ISREG(status.st_mode)) fail({"cannot open '", path, "': it is no regular file"});
  }

 private:
  int value_;
};

/// A write past the cache begins at a multiple of this many bytes, in memory and in the file. So does its length. No
/// disk or file system in use asks for more.
inline constexpr std::size_t direct_alignment = 4096;
/// Smaller pieces go through the cache, where they are gathered.
inline constexpr std::size_t direct_bytes = std::size_t{256} << 10;

/// Returns how many of the first of `bytes`, of a file from `offset` on, can go past the cache.
inline std::size_t direct_part(std::uint64_t offset, std::span<const std::byte> bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  if (bytes.size() < direct_bytes || offset % direct_alignment != 0 || address % direct_alignment != 0) return 0;
  return bytes.size() / direct_alignment * direct_alignment;
}

/// Files of a few pages never open a second descriptor. Past the cache (O_DIRECT) bytes take a twentieth of the
/// processor's time or less. The cache keeps what it has. Some file systems refuse this; there all goes through the
/// cache.
class posix_file : public open_file {
 public:
  /// Writes that are under way at once, at most.
  static constexpr std::size_t most_writes = 4;

  posix_file(const std::string& path, int flags, const char* operation)
      : open_file(path), descriptor_(path, flags, operation), access_(flags & O_ACCMODE) {
    descriptor_.require_regular(path);
#ifdef POSIX_FADV_SEQUENTIAL
    // Steps are read from end to end. The system then reads further ahead; that it does not is no error.
    if (access_ == O_RDONLY) ::posix_fadvise(descriptor_.value(), 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
  }
  ~posix_file() override {
    writes_.clear();  // waits: the system must not read memory that has another owner then
    if (direct_ >= 0) ::close(direct_);
  }
  /// A thread writes a large block while the caller computes: as fast as io_uring, which many systems do not allow.
  void start_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    if (bytes.size() < direct_bytes) return write(offset, bytes);
    if (writes_.size() == most_writes) end_write();
    writes_.push_back(std::async([this, offset, bytes] { write(offset, bytes); }));
  }
  void finish_writes() override {
    while (!writes_.empty()) end_write();
  }
  std::uint64_t size() const override {
    struct stat status {};
    if (::fstat(descriptor_.value(), &status) != 0) fail_file("examine", path(), errno);
    return static_cast<std::uint64_t>(status.st_size);
  }
  int descriptor() const { return descriptor_.value(); }

 private:
  /// Waits for the oldest write. One that has failed stays, so that every later wait throws its error.
  void end_write() {
    writes_.front().get();
    writes_.pop_front();
  }
  /// Returns another descriptor of the file for what goes past the cache; -1 where the file system has none.
  int direct_descriptor() const {
#ifdef O_DIRECT
    std::call_once(opened_, [&] {
      const std::string same = "/proc/self/fd/" + std::to_string(descriptor_.value());  // whatever its name is by now
      direct_ = uninterrupted([&] { return ::open(same.c_str(), access_ | O_DIRECT | O_CLOEXEC); });
    });
#endif
    return refused_ ? -1 : direct_;
  }
  /// Lets all go through the cache from now on.
  void refuse_direct() const { refused_ = true; }

  std::size_t write_some(std::uint64_t offset, std::span<const std::byte> bytes) override {
    if (const std::size_t part = direct_part(offset, bytes); part > 0) {
      if (const int direct = direct_descriptor(); direct >= 0) {
        const ssize_t written = pwrite(direct, offset, bytes.first(part));
        if (written > 0) return static_cast<std::size_t>(written);
        if (written < 0 && errno != EINVAL) fail_file("write", path(), errno);
        refuse_direct();  // a disk with other blocks than it reported
      }
    }
    const ssize_t written = pwrite(descriptor_.value(), offset, bytes);
    if (written < 0) fail_file("write", path(), errno);
    return static_cast<std::size_t>(written);
  }
  static ssize_t pwrite(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes) {
    return uninterrupted([&] { return ::pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
  }
  /// Where memory and its place in the file have equal offsets within a page, memory is filled up to the next page
  /// first.
  std::size_t read_some(std::uint64_t offset, std::span<std::byte> bytes) const override {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    const bool fits = bytes.size() > direct_bytes && (address - offset) % direct_alignment == 0;
    if (const int direct = fits ? direct_descriptor() : -1; direct >= 0) {  // another thread may refuse it meanwhile
      const std::size_t part = direct_part(offset, bytes);
      if (part == 0) return pread(descriptor(), offset, bytes.first(direct_alignment - offset % direct_alignment));
      const ssize_t got =
          uninterrupted([&] { return ::pread(direct, bytes.data(), part, static_cast<off_t>(offset)); });
      if (got >= 0) return static_cast<std::size_t>(got);
      if (errno != EINVAL) fail_file("read", path(), errno);
      refuse_direct();
    }
    return pread(descriptor(), offset, bytes);
  }
  std::size_t pread(int descriptor, std::uint64_t offset, std::span<std::byte> bytes) const {
    const ssize_t got =
        uninterrupted([&] { return ::pread(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (got < 0) fail_file("read", path(), errno);
    return static_cast<std::size_t>(got);
  }
  void sync_once() override {
    if (::fsync(descriptor_.value()) != 0) fail_file("sync", path(), errno);
  }

  posix_descriptor descriptor_;
  int access_;
  mutable std::once_flag opened_;
  mutable int direct_ = -1;
  mutable std::atomic<bool> refused_ = false;
  std::deque<std::shared_future<void>> writes_;  ///< oldest first
};

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

/// Returns the files of this machine, the default of functions that take a file system.
inline file_system& machine_files() {
  static posix_file_system files;
  return files;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
