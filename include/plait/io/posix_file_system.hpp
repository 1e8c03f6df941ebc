// The file operations of io/file_system.hpp by POSIX calls. Large blocks bypass the page cache if the disk allows it.
// Large writes use io_uring in programs that are built with liburing (PLAIT_WITH_LIBURING).
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
#ifdef PLAIT_WITH_LIBURING
#include <liburing.h>
#endif

namespace plait {

namespace detail {

/// Repeats a system call while it is interrupted.
template <class Call>
auto uninterrupted(Call&& call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

/// A file descriptor that is closed when destroyed. It is never one of the first three, because programs print to
/// those.
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

  /// Refuses a path that is not a regular file, because a read or a map of it could wait forever.
  void require_regular(const std::string& path) const {
    struct stat status {};
    if (::fstat(value_, &status) != 0) fail_file("examine", path, errno);
    if (S_ISDIR(status.st_mode)) fail({"cannot open '", path, "': it is a folder"});
    if (!S_ISREG(status.st_mode)) fail({"cannot open '", path, "': it is not a regular file"});
  }

 private:
  int value_;
};

/// A write that bypasses the cache must begin and end at a multiple of this many bytes, in memory and in the file. No
/// disk or file system in use needs more.
inline constexpr std::size_t direct_alignment = 4096;
/// Smaller pieces go through the cache, which joins them.
inline constexpr std::size_t direct_bytes = std::size_t{256} << 10;

/// Returns how many bytes at the beginning of `bytes` can bypass the cache, at `offset` of a file.
inline std::size_t direct_part(std::uint64_t offset, std::span<const std::byte> bytes) {
  const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
  if (bytes.size() < direct_bytes || offset % direct_alignment != 0 || address % direct_alignment != 0) return 0;
  return bytes.size() / direct_alignment * direct_alignment;
}

/// A file with a second descriptor for accesses that bypass the cache (O_DIRECT); files of a few pages never open it.
/// These accesses take at most a twentieth of the processor time, and keep the cache's contents. If the file system
/// refuses them, all accesses go through the cache.
class posix_file : public open_file {
 public:
  posix_file(const std::string& path, int flags, const char* operation)
      : open_file(path), descriptor_(path, flags, operation), access_(flags & O_ACCMODE) {
    descriptor_.require_regular(path);
#ifdef POSIX_FADV_SEQUENTIAL
    // Steps are read sequentially. With this hint the system reads further ahead; its failure is no error.
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
  /// Returns the descriptor for accesses that bypass the cache; -1 if the file system does not support them.
  int direct_descriptor() const {
#ifdef O_DIRECT
    std::call_once(opened_, [&] {
      // This path is valid even if the file was renamed.
      const std::string same = "/proc/self/fd/" + std::to_string(descriptor_.value());
      direct_ = uninterrupted([&] { return ::open(same.c_str(), access_ | O_DIRECT | O_CLOEXEC); });
    });
#endif
    return refused_ ? -1 : direct_;
  }
  /// Makes all later accesses go through the cache.
  void refuse_direct() const { refused_ = true; }

 private:
  std::size_t write_some(std::uint64_t offset, std::span<const std::byte> bytes) override {
    if (const std::size_t part = direct_part(offset, bytes); part > 0) {
      if (const int direct = direct_descriptor(); direct >= 0) {
        const ssize_t written = pwrite(direct, offset, bytes.first(part));
        if (written > 0) return static_cast<std::size_t>(written);
        if (written < 0 && errno != EINVAL) fail_file("write", path(), errno);
        refuse_direct();  // the disk's blocks differ from those it reported
      }
    }
    const ssize_t written = pwrite(descriptor_.value(), offset, bytes);
    if (written < 0) fail_file("write", path(), errno);
    return static_cast<std::size_t>(written);
  }
  static ssize_t pwrite(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes) {
    return uninterrupted([&] { return ::pwrite(descriptor, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
  }
  /// If memory and file have equal offsets within a page, reads up to the next page boundary first.
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

/// Returns the name of this machine, or an empty text if it is unknown.
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
  // Writes the owner's name for the error text of other writers; the lock does not depend on it.
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

/// The files of this machine. It has no state, so any number of objects and threads may work concurrently. Locks are
/// the system's (flock), and end with the process that holds them, also after a crash.
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
        if (errno == ENOENT) continue;  // removed meanwhile
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

/// Starts writes, and reports their completions in any order. Only one thread may use it.
class write_ring {
 public:
  struct ended {
    std::size_t tag = 0;
    std::int64_t result = 0;  ///< bytes written, or the negative system error number
  };
  virtual ~write_ring() = default;
  /// Starts a write. Its bytes and descriptor must stay valid until it has ended. Throws `error` if it cannot start.
  virtual void submit(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes, std::size_t tag) = 0;
  /// Waits for some write to end. Throws `error` only if the ring itself is broken.
  virtual ended wait() = 0;
};

namespace detail {

/// Makes a ring for `writes` concurrent writes.
using ring_maker = std::unique_ptr<write_ring> (*)(unsigned writes);

class ring_file final : public posix_file {
 public:
  /// The most concurrent writes of a file.
  static constexpr std::size_t most = 4;
  /// Bytes of one write.
  static constexpr std::size_t at_once = std::size_t{8} << 20;

  ring_file(const std::string& path, int flags, const char* operation, ring_maker make)
      : posix_file(path, flags, operation), make_(make) {}
  ~ring_file() override {
    while (in_progress_ > 0 && !broken_) {  // the system must not read memory after its owner has freed it
      try {
        end_one();
      } catch (const error&) {
      }
    }
  }

  /// Starts to write the whole pages among `bytes`; writes the rest at once.
  void start_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    const std::size_t part = direct_part(offset, bytes);
    throw_failure();
    for (std::size_t at = 0; at < part; at += at_once)
      begin(offset + at, bytes.subspan(at, std::min(at_once, part - at)));
    if (part < bytes.size()) write(offset + part, bytes.subspan(part));
  }
  void finish_writes() override {
    while (in_progress_ > 0) end_one();
    throw_failure();
  }

 private:
  struct slot {
    std::uint64_t offset = 0;
    std::span<const std::byte> bytes{};
    bool in_use = false;
  };

  void begin(std::uint64_t offset, std::span<const std::byte> bytes) {
    if (!ring_) {
      ring_ = make_(most);
      slots_.resize(most);
    }
    while (in_progress_ == most) end_one();
    throw_failure();
    const auto free = std::find_if(slots_.begin(), slots_.end(), [](const slot& s) { return !s.in_use; });
    *free = {offset, bytes, true};
    ++in_progress_;
    submit(static_cast<std::size_t>(free - slots_.begin()));
  }
  /// Bypasses the cache if the file system supports it.
  void submit(std::size_t tag) {
    try {
      const int direct = direct_descriptor();
      ring_->submit(direct >= 0 ? direct : descriptor(), slots_[tag].offset, slots_[tag].bytes, tag);
    } catch (...) {
      release(tag);
      throw;
    }
  }
  void release(std::size_t tag) {
    slots_[tag] = {};
    --in_progress_;
  }
  /// Waits until one write ends. It starts an interrupted write again. The rest of a short write goes through the
  /// cache, because it may begin within a page. So does a write whose blocks the disk refuses.
  void end_one() {
    write_ring::ended e;
    try {
      e = ring_->wait();
    } catch (...) {
      broken_ = true;
      in_progress_ = 0;
      throw;
    }
    slot& s = slots_.at(e.tag);
    if (e.result == -EINTR || e.result == -EAGAIN) return submit(e.tag);
    if (e.result == -EINVAL) refuse_direct();
    const bool again = e.result == -EINVAL, failed = e.result < 0 && !again;
    const auto done = again || failed ? 0 : static_cast<std::size_t>(e.result);
    const slot ended = std::exchange(s, {});
    --in_progress_;
    if (failed && error_ == 0) error_ = static_cast<int>(-e.result);
    if (!failed && error_ == 0 && done < ended.bytes.size()) write(ended.offset + done, ended.bytes.subspan(done));
  }
  /// Throws the error of the first failed write, in every call after it.
  void throw_failure() const {
    if (broken_) fail({"cannot write '", path(), "': the ring of its writes is broken"});
    if (error_ != 0) fail_file("write", path(), error_);
  }

  ring_maker make_;
  std::unique_ptr<write_ring> ring_;
  std::vector<slot> slots_;
  std::size_t in_progress_ = 0;
  int error_ = 0;
  bool broken_ = false;
};

}  // namespace detail

#ifdef PLAIT_WITH_LIBURING

namespace detail {

/// An io_uring of one thread. Its memory is not registered: that would pin the memory, without a measurable gain at
/// this block size.
class uring final : public write_ring {
 public:
  explicit uring(unsigned writes) {
    const int result = ::io_uring_queue_init(writes, &ring_, 0);
    if (result < 0) fail({"io_uring cannot be set up: ", std::strerror(-result)});
  }
  ~uring() override { ::io_uring_queue_exit(&ring_); }
  uring(const uring&) = delete;
  uring& operator=(const uring&) = delete;

  void submit(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes, std::size_t tag) override {
    io_uring_sqe* const entry = ::io_uring_get_sqe(&ring_);
    if (entry == nullptr) fail("io_uring takes no more writes");
    ::io_uring_prep_write(entry, descriptor, bytes.data(), static_cast<unsigned>(bytes.size()), offset);
    ::io_uring_sqe_set_data64(entry, tag);
    int result = 0;
    do {
      result = ::io_uring_submit(&ring_);
    } while (result == -EINTR || result == -EAGAIN);
    if (result < 0) fail({"io_uring takes no write: ", std::strerror(-result)});
  }
  ended wait() override {
    io_uring_cqe* entry = nullptr;
    int result = 0;
    do {
      result = ::io_uring_wait_cqe(&ring_, &entry);
    } while (result == -EINTR);
    if (result < 0) fail({"io_uring tells no end of a write: ", std::strerror(-result)});
    const ended out{static_cast<std::size_t>(::io_uring_cqe_get_data64(entry)), entry->res};
    ::io_uring_cqe_seen(&ring_, entry);
    return out;
  }

 private:
  ::io_uring ring_{};
};

inline std::unique_ptr<write_ring> make_uring(unsigned writes) { return std::make_unique<uring>(writes); }

}  // namespace detail

/// The files of this machine; files that it creates are written through io_uring. The constructor throws `error` if the
/// system lacks or forbids io_uring, as in many containers (seccomp, /proc/sys/kernel/io_uring_disabled).
class uring_file_system final : public posix_file_system {
 public:
  explicit uring_file_system(detail::ring_maker make = detail::make_uring) : make_(make) { make_(1); }
  std::unique_ptr<open_file> create(const std::string& path) override {
    return std::make_unique<detail::ring_file>(path, O_RDWR | O_CREAT | O_EXCL, "create", make_);
  }

 private:
  detail::ring_maker make_;
};

#endif

/// How large writes are made.
enum class file_io {
  automatic,  ///< io_uring if it is available and allowed, else threads
  uring,
  threads,  ///< by pwrite
};

/// A file system, and how it writes.
struct chosen_files {
  file_system* files = nullptr;
  file_io io = file_io::threads;  ///< `uring` or `threads`
  std::string why{};              ///< why `automatic` did not select `uring`; else empty
};

/// Returns the machine's files with the writes that `io` selects. They live as long as the program. Throws `error` that
/// names `field` if io_uring is requested and not available.
inline chosen_files choose_files(file_io io, std::string_view field = "file_io") {
  if (io == file_io::threads) return {&machine_files(), file_io::threads, {}};
#ifdef PLAIT_WITH_LIBURING
  std::string fault;
  try {
    static uring_file_system files;
    return {&files, file_io::uring, {}};
  } catch (const error& e) {
    fault = e.what();
  }
#else
  std::string fault = "this program was built without liburing";
#endif
  if (io == file_io::uring) fail({field, " uring: ", fault, "; legal here are ", field, " auto and threads"});
  return {&machine_files(), file_io::threads, std::move(fault)};
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
