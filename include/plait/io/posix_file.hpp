// A regular file by the system's calls: pwrite, pread, fsync. Large pieces go past the page cache where the disk takes
// them. Directories and locks: io/posix_file_system.hpp. Several writes at once: io/ring_file.hpp.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"

namespace plait::detail {

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

/// A write past the cache begins at a multiple of this many bytes, in memory and in the file, and has a multiple of
/// them: no disk or file system in use asks for more.
inline constexpr std::size_t direct_alignment = 4096;
/// Smaller pieces go through the cache, where they are gathered.
inline constexpr std::size_t direct_bytes = std::size_t{256} << 10;

/// Returns how many of the first of `bytes`, of a file from `offset` on, can go past the cache.
inline std::size_t direct_part(std::uint64_t offset, std::span<const std::byte> bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  if (bytes.size() < direct_bytes || offset % direct_alignment != 0 || address % direct_alignment != 0) return 0;
  return bytes.size() / direct_alignment * direct_alignment;
}

/// Files of a few pages never open a second descriptor. Past the cache (O_DIRECT) the same bytes take the processor a
/// twentieth of the time or less, and leave what others have in the cache there. Some file systems refuse it; there all
/// goes through the cache.
class posix_file : public open_file {
 public:
  posix_file(const std::string& path, int flags, const char* operation)
      : open_file(path), descriptor_(path, flags, operation), access_(flags & O_ACCMODE) {
    descriptor_.require_regular(path);
#ifdef POSIX_FADV_SEQUENTIAL
    // Steps are read from end to end. The system then reads further ahead; that it does not is no error.
    if (access_ == O_RDONLY) ::posix_fadvise(descriptor_.value(), 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
  }
  ~posix_file() override {
    if (direct_ >= 0) ::close(direct_);
  }
  std::uint64_t size() const override {
    struct stat status {};
    if (::fstat(descriptor_.value(), &status) != 0) fail_file("examine", path(), errno);
    return static_cast<std::uint64_t>(status.st_size);
  }
  int descriptor() const override { return descriptor_.value(); }

 protected:
  /// Returns a descriptor of the same file for what goes past the cache; -1 where the file system has none.
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

 private:
  std::size_t write_some(std::uint64_t offset, std::span<const std::byte> bytes) override {
    if (const std::size_t part = direct_part(offset, bytes); part > 0) {
      if (const int direct = direct_descriptor(); direct >= 0) {
        const ssize_t written = pwrite(direct, offset, bytes.first(part));
        if (written > 0) return static_cast<std::size_t>(written);
        if (written < 0 && errno != EINVAL) fail_file("write", path(), errno);
        refuse_direct();  // a disk with other blocks than it said
      }
    }
    const ssize_t written = pwrite(descriptor_.value(), offset, bytes);
    if (written < 0) fail_file("write", path(), errno);
    return static_cast<std::size_t>(written);
  }
  static ssize_t pwrite(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes) {
    return uninterrupted([&] { return ::pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
  }
  /// Memory that lies as many bytes behind a page as its place in the file does is filled up to the next page first.
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
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
