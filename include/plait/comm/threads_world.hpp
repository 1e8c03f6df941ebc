#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "plait/comm/recorder.hpp"
#include "plait/comm/threads_operation.hpp"
#include "plait/core/error.hpp"

namespace plait::threads {

/// Thrown on the ranks that are stopped because of another one; `threads::run` reports the cause instead of it.
class stopped : public error {
 public:
  using error::error;
};

namespace detail {

// A futex sleeps and wakes in about half the time of std::atomic::wait, which hashes the address, counts its waiters
// and spins on its own terms (1 KB all-reduce on 8 ranks and 2 cores: 6-9 against 9-17 microseconds).
inline void sleep_while_zero(std::atomic<std::uint32_t>& word) {
  while (word.load(std::memory_order_acquire) == 0) {
#if defined(__linux__)
    static_assert(sizeof word == 4);
    ::syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
#else
    word.wait(0, std::memory_order_acquire);
#endif
  }
}

inline void wake(std::atomic<std::uint32_t>& word) {
  word.store(1, std::memory_order_release);
#if defined(__linux__)
  ::syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
#else
  word.notify_one();
#endif
}

/// Ranks that share sequence numbers. All members are guarded by the world's mutex.
struct group {
  std::string label;
  std::vector<int> members;           ///< world ranks
  std::vector<operation*> window;     ///< unfinished collectives, at sequence % size (a power of two)
  std::vector<operation*> unmatched;  ///< messages with one side only, oldest first
  std::vector<operation*> idle_collectives, idle_messages;
  std::vector<std::unique_ptr<operation>> store;
};

/// What the ranks of one run share: who sleeps, who is gone, and why the run ends.
///
/// The invariant behind exact deadlock detection: `running` counts the ranks that are neither asleep nor gone. A rank
/// falls asleep under the mutex, after it has seen there that its operation has not moved. Whoever moves an operation
/// does so under the mutex too and counts the ranks that it wakes as running on their behalf, before they run. So
/// `running == 0` means that nobody can move anything any more, and it is seen by the rank that makes it so.
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
  bool wait(int rank, operation& op, std::uint32_t want, std::uint64_t ticket) {
    for (int i = 0; i < 20; ++i) {
      if ((op.word.load(std::memory_order_acquire) & want) != 0) return true;
      std::this_thread::yield();
    }
    slot& me = slot_of(rank);
    {
      const std::lock_guard lock(mutex_);
      if ((op.word.load(std::memory_order_acquire) & want) != 0) return true;
      if (failed() && !op.complete()) return false;
      me.flight.mark(ticket, flight_recorder::state::waiting);
      me.waits_for = &op;
      me.want = want;
      me.word.store(0, std::memory_order_relaxed);
      --running_;
      if (running_ == 0 && !failed()) fail_locked("deadlock: no rank can go on" + situation());
    }
    sleep_while_zero(me.word);
    if ((op.word.load(std::memory_order_acquire) & want) != 0) return true;
    const std::lock_guard lock(mutex_);
    if (!op.complete()) return false;
    // The world failed while others work on the operation: they finish, and only then may the buffers go.
    return wait_for_completion(me, op);
  }

  /// Sets `bits` of the operation's word and wakes at most `most` of the ranks asleep for them.
  void signal(operation& op, std::uint32_t bits, std::size_t most = ~std::size_t{0}) {
    std::array<slot*, 64> woken;
    std::size_t count = 0;
    {
      const std::lock_guard lock(mutex_);
      op.word.fetch_or(bits, std::memory_order_release);
      for (const int r : op.world_ranks) {
        slot& s = slot_of(r);
        if (most == 0) break;
        if (s.waits_for != &op || (s.want & bits) == 0) continue;
        --most;
        s.waits_for = nullptr;
        ++running_;
        if (count < woken.size()) {
          woken[count++] = &s;
        } else {
          wake(s.word);
        }
      }
    }
    for (std::size_t i = 0; i < count; ++i) wake(woken[i]->word);  // not under the mutex: they would run into it
  }

  /// How many sleeping ranks are worth waking to share work.
  std::size_t helpers() const { return helpers_; }

  /// The end of every rank, if there was none before. Wakes all; they throw `stopped`.
  void fail(const std::string& why) {
    const std::lock_guard lock(mutex_);
    fail_locked(why + flights());
  }

  /// A mismatch, found while the mutex is held.
  [[noreturn]] void fail_here(const std::string& why) {
    fail_locked(why + flights());
    throw stopped(why);
  }

  /// A rank is destroying a request while an exception unwinds it: the others must not wait for it. What it died of is
  /// known only when the exception arrives.
  void fail_by_unwinding(int rank) {
    const std::lock_guard lock(mutex_);
    if (failed()) return;
    unwinding_ = rank;
    fail_locked(cat({"rank ", rank, " is leaving by an exception"}));
  }

  /// The rank's function has ended, by `exception` if not null.
  void leave(int rank, std::exception_ptr exception, const std::string& what) {
    const std::lock_guard lock(mutex_);
    slot_of(rank).gone = true;
    --running_;
    if (exception && unwinding_ == rank) {
      unwinding_ = -1;
      cause_ = cat({"rank ", rank, ": ", what, flights()});
      exception_ = std::move(exception);
    } else if (exception && !failed()) {
      exception_ = std::move(exception);
      fail_locked(cat({"rank ", rank, ": ", what, flights()}));
    }
    if (running_ == 0 && !failed() && !all_gone()) fail_locked("deadlock: no rank can go on" + situation());
  }

  /// Throws `stopped` on `rank` if the world failed. The mutex may be held or not.
  [[noreturn]] void throw_stopped(int rank, const std::string& doing, const std::string& cause) const {
    throw stopped(cat({"rank ", rank, ": ", doing, " was stopped: ", cause}));
  }
  std::string cause() {
    const std::lock_guard lock(mutex_);
    return cause_;
  }
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

  bool all_gone() const {
    return std::all_of(slots_.begin(), slots_.end(), [](const slot& s) { return s.gone; });
  }

  void fail_locked(const std::string& why) {
    if (failed()) return;
    cause_ = why;
    failed_.store(true, std::memory_order_release);
    for (slot& s : slots_) {
      if (s.waits_for == nullptr) continue;
      s.waits_for = nullptr;
      ++running_;
      wake(s.word);
    }
  }

  /// Called with the mutex held, after the world failed; waits without heeding that.
  bool wait_for_completion(slot& me, operation& op) {
    while ((op.word.load(std::memory_order_acquire) & operation::finished) == 0) {
      me.waits_for = &op;
      me.want = operation::finished;
      me.word.store(0, std::memory_order_relaxed);
      --running_;
      mutex_.unlock();
      sleep_while_zero(me.word);
      mutex_.lock();
    }
    return true;
  }

  /// What every rank is doing, one line each.
  std::string situation() {
    std::string out;
    for (int r = 0; r < size(); ++r) {
      const slot& s = slot_of(r);
      append(out, {"\n  rank ", r});
      if (s.gone) {
        out += " has returned";
      } else if (s.waits_for != nullptr) {
        out += " waits in " + describe(*s.waits_for, r);
      } else {
        out += " runs";
      }
      out += "; last: " + s.flight.text();
    }
    return out;
  }

  std::string flights() {
    std::string out = "\nlast operations";
    for (int r = 0; r < size(); ++r) append(out, {"\n  rank ", r, ": ", slot_of(r).flight.text()});
    return out;
  }

  static std::string describe(const operation& op, int rank) {
    const signature& s = op.what;
    if (s.what == action::message) {
      const bool sends = op.parts[0].here && op.world_ranks[0] == rank;
      return cat({sends ? "send to rank " : "receive from rank ", op.world_ranks[sends ? 1 : 0], " (", s.count, " ",
                  plait::name_of(s.type), ", tag ", s.root, ") on '", op.home->label, "': the other side is missing"});
    }
    std::string missing;
    for (std::size_t i = 0; i < op.parts.size(); ++i) {
      if (!op.parts[i].here) append(missing, {(missing.empty() ? "" : ", "), op.world_ranks[i]});
    }
    return cat({text(s), " #", op.sequence, " on '", op.home->label, "': missing ranks ", missing});
  }

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
