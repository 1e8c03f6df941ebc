// The state of one in-process run: which ranks wait, which are gone, and why the run ends. Test:
// tests/unit/comm/threads_errors.cpp.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/recorder.hpp"
#include "plait/comm/threads/operation.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::threads {

/// Thrown on the ranks that are stopped because of another one; `threads::run` reports the cause instead of it.
class stopped : public error {
 public:
  using error::error;
};

namespace detail {

/// Ranks that share sequence numbers. All members are guarded by the world's mutex.
struct group {
  std::string label;
  std::vector<int> members;           ///< world ranks
  std::vector<operation*> window;     ///< unfinished collectives, at sequence % size (a power of two)
  std::vector<operation*> unmatched;  ///< messages with one side only, oldest first
  std::vector<operation*> idle_collectives, idle_messages;
  std::vector<std::unique_ptr<operation>> store;
};

/// The state that the ranks of one run share: who sleeps, who is gone, and why the run ends.
///
/// The invariant of exact deadlock detection: `running` counts the ranks that are neither asleep nor gone. A rank
/// falls asleep under the mutex, after it has seen there that its operation has not moved. Whoever moves an operation
/// does so under the mutex too and counts the ranks that it wakes as running on their behalf, before they run. So
/// `running == 0` means that no rank can move anything any more, and it is seen by the rank that makes it so.
class world {
 public:
  explicit world(int ranks)
      : slots_(static_cast<std::size_t>(ranks)),
        running_(ranks),
        helpers_(std::max(1u, std::thread::hardware_concurrency()) - 1) {}

  int size() const { return static_cast<int>(slots_.size()); }
  std::mutex& mutex() { return mutex_; }
  flight_recorder& flight(int rank) { return slot_of(rank).flight; }
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  /// The one place where a rank blocks: until one of the bits `want` of the operation is set. False if the world failed
  /// first and the operation is not complete (then no other rank will ever touch this rank's buffers).
  bool wait(int rank, operation& op, std::uint32_t want, std::uint64_t ticket);

  /// Sets `bits` of the operation's word and wakes at most `most` of the ranks asleep for them.
  void signal(operation& op, std::uint32_t bits, std::size_t most = ~std::size_t{0});

  /// How many sleeping ranks are worth waking to share work.
  std::size_t helpers() const { return helpers_; }

  /// The end of every rank, if there was none before. Wakes all; they throw `stopped`.
  void fail(const std::string& why);

  /// A mismatch, found while the mutex is held.
  [[noreturn]] void fail_here(const std::string& why);

  /// A rank is destroying a request while an exception unwinds it: the others must not wait for it. What it died of is
  /// known only when the exception arrives.
  void fail_by_unwinding(int rank);

  /// The rank's function has ended, by `exception` if not null.
  void leave(int rank, std::exception_ptr exception, const std::string& what);

  /// Throws `stopped` on `rank` if the world failed. The mutex may be held or not.
  [[noreturn]] void throw_stopped(int rank, const std::string& doing, const std::string& cause) const;
  std::string cause();
  const std::string& cause_locked() const { return cause_; }
  std::exception_ptr exception() const { return exception_; }

 private:
  struct alignas(64) slot {
    std::atomic<std::uint32_t> word{0};
    const operation* waits_for = nullptr;  ///< null while the rank runs
    std::uint32_t want = 0;
    bool gone = false;
    flight_recorder flight;
  };

  slot& slot_of(int rank) { return slots_[static_cast<std::size_t>(rank)]; }

  bool all_gone() const;
  void fail_locked(const std::string& why);
  /// Called with the mutex held, after the world failed; waits without heeding that.
  bool wait_for_completion(slot& me, operation& op);

  /// Returns what every rank is doing, one line each.
  std::string situation();
  std::string flights();
  static std::string describe(const operation& op, int rank);

  std::mutex mutex_;
  std::vector<slot> slots_;
  int running_;
  int unwinding_ = -1;
  std::size_t helpers_;
  std::atomic<bool> failed_{false};
  std::string cause_;
  std::exception_ptr exception_;
};

}  // namespace detail
}  // namespace plait::threads

#ifndef PLAIT_COMPILED
#include "plait/comm/threads/world.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
