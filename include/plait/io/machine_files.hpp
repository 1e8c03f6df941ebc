// Chooses how the machine's files are written: large writes through io_uring, several at a time, or by pwrite. The
// CMake target plait::uring defines PLAIT_WITH_LIBURING, without which there is no io_uring.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"
#include "plait/io/posix_file_system.hpp"
#ifdef PLAIT_WITH_LIBURING
#include <liburing.h>
#endif

namespace plait {

/// Takes writes and tells their ends, in any order. Used by one thread.
class write_ring {
 public:
  struct ended {
    std::size_t tag = 0;
    std::int64_t result = 0;  ///< bytes written, or the negative number of the system's error
  };
  virtual ~write_ring() = default;
  /// Begins a write; its bytes and descriptor stay until it has ended. Throws `error` if it cannot begin.
  virtual void submit(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes, std::size_t tag) = 0;
  /// Waits for some write to end. Throws `error` only if the ring itself is broken.
  virtual ended wait() = 0;
};

namespace detail {

/// Makes a ring for `writes` writes at once.
using ring_maker = std::unique_ptr<write_ring> (*)(unsigned writes);

class ring_file final : public posix_file {
 public:
  /// Writes of a file that are under way at once, at most.
  static constexpr std::size_t most = 4;
  /// Bytes of one of them.
  static constexpr std::size_t at_once = std::size_t{8} << 20;

  ring_file(const std::string& path, int flags, const char* operation, ring_maker make)
      : posix_file(path, flags, operation), make_(make) {}
  ~ring_file() override {
    while (under_way_ > 0 && !broken_) {  // the system must not read memory that has another owner then
      try {
        end_one();
      } catch (const error&) {
      }
    }
  }

  /// Starts a write of the pages among `bytes`; the rest is written at once.
  void start_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    const std::size_t part = direct_part(offset, bytes);
    throw_failure();
    for (std::size_t at = 0; at < part; at += at_once)
      begin(offset + at, bytes.subspan(at, std::min(at_once, part - at)));
    if (part < bytes.size()) write(offset + part, bytes.subspan(part));
  }
  void finish_writes() override {
    while (under_way_ > 0) end_one();
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
    while (under_way_ == most) end_one();
    throw_failure();
    const auto free = std::find_if(slots_.begin(), slots_.end(), [](const slot& s) { return !s.in_use; });
    *free = {offset, bytes, true};
    ++under_way_;
    submit(static_cast<std::size_t>(free - slots_.begin()));
  }
  /// Past the cache where the file system takes that.
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
    --under_way_;
  }
  /// Waits for one end. A write that was interrupted is begun again. The rest of a short write goes through the cache,
  /// since it may begin within a page. So does one whose blocks the disk refuses.
  void end_one() {
    write_ring::ended e;
    try {
      e = ring_->wait();
    } catch (...) {
      broken_ = true;
      under_way_ = 0;
      throw;
    }
    slot& s = slots_.at(e.tag);
    if (e.result == -EINTR || e.result == -EAGAIN) return submit(e.tag);
    if (e.result == -EINVAL) refuse_direct();
    const bool again = e.result == -EINVAL, failed = e.result < 0 && !again;
    const auto done = again || failed ? 0 : static_cast<std::size_t>(e.result);
    const slot ended = std::exchange(s, {});
    --under_way_;
    if (failed && error_ == 0) error_ = static_cast<int>(-e.result);
    if (!failed && error_ == 0 && done < ended.bytes.size()) write(ended.offset + done, ended.bytes.subspan(done));
  }
  /// Tells the first write that failed, and every call after it.
  void throw_failure() const {
    if (broken_) fail({"cannot write '", path(), "': the ring of its writes is broken"});
    if (error_ != 0) fail_file("write", path(), error_);
  }

  ring_maker make_;
  std::unique_ptr<write_ring> ring_;
  std::vector<slot> slots_;
  std::size_t under_way_ = 0;
  int error_ = 0;
  bool broken_ = false;
};

}  // namespace detail

#ifdef PLAIT_WITH_LIBURING

namespace detail {

/// An io_uring of one thread. Memory is not registered with it, which would pin it and save nothing that can be
/// measured at blocks of this size.
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

/// The files of this machine; those that it creates write through io_uring. Throws `error` when it is made where the
/// system has no io_uring or does not allow it, as containers often do (seccomp, /proc/sys/kernel/io_uring_disabled).
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

/// How large writes reach the disk.
enum class file_io {
  automatic,  ///< by io_uring where it is there and allowed, else by threads
  uring,
  threads,  ///< by pwrite
};

/// Files, and how they are written.
struct chosen_files {
  file_system* files = nullptr;
  file_io io = file_io::threads;  ///< `uring` or `threads`
  std::string why{};              ///< why `automatic` did not become `uring`, or nothing
};

/// Returns the machine's files, written as `io` selects. They live as long as the program. Throws `error` that names
/// `field` where io_uring is asked for and not there.
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
