// A file whose large writes are handed to a ring, several at a time, while the caller goes on. What a ring is made of:
// io/uring_file_system.hpp, by the system; tests/unit/io/ring_file.cpp, by hand, with every fault.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/io/file_system.hpp"
#include "plait/io/posix_file.hpp"

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

/// Makes a ring for so many writes at once.
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
    while (under_way_ > 0 && !broken_) {  // the system must not read memory that is somebody else's then
      try {
        end_one();
      } catch (const error&) {
      }
    }
  }

  /// Starts a write of the pages among `bytes`; the rest is written at once.
  void start_write(std::uint64_t offset, std::span<const std::byte> bytes) override {
    const std::size_t part = direct_part(offset, bytes);
    complain();
    for (std::size_t at = 0; at < part; at += at_once)
      begin(offset + at, bytes.subspan(at, std::min(at_once, part - at)));
    if (part < bytes.size()) write(offset + part, bytes.subspan(part));
  }
  void finish_writes() override {
    while (under_way_ > 0) end_one();
    complain();
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
    complain();
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
  /// Waits for one end. A write that was interrupted is begun again; the rest of one that came short goes through the
  /// cache, since it may begin within a page, and so does one whose blocks the disk does not take.
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
  void complain() const {
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

}  // namespace plait

#include "plait/core/macros_on.hpp"
