// The machine's files, whose large writes go through io_uring. Needs liburing; io/machine_files.hpp includes it where
// PLAIT_WITH_LIBURING is defined, as it is by the CMake target plait::uring. What happens to a write: io/ring_file.hpp.
#pragma once

#include <liburing.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/posix_file_system.hpp"
#include "plait/io/ring_file.hpp"

namespace plait {

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

/// Returns why `make` makes no ring that is of use, or nothing.
inline std::string ring_fault(ring_maker make) {
  try {
    make(1);
    return {};
  } catch (const error& e) {
    return e.what();
  }
}

}  // namespace detail

/// The files of this machine; those that it creates write through io_uring. Throws `error` when it is made where the
/// system has no io_uring or does not allow it, as containers often do (seccomp, /proc/sys/kernel/io_uring_disabled).
class uring_file_system final : public posix_file_system {
 public:
  explicit uring_file_system(detail::ring_maker make = detail::make_uring) : make_(make) {
    if (const std::string fault = detail::ring_fault(make); !fault.empty()) fail(fault);
  }
  std::unique_ptr<open_file> create(const std::string& path) override {
    return std::make_unique<detail::ring_file>(path, O_RDWR | O_CREAT | O_EXCL, "create", make_);
  }

 private:
  detail::ring_maker make_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
