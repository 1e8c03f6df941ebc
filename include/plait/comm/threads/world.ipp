// The definitions of world.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait::threads::detail {

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

PLAIT_INLINE bool world::wait(int rank, operation& op, std::uint32_t want, std::uint64_t ticket) {
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

PLAIT_INLINE void world::signal(operation& op, std::uint32_t bits, std::size_t most) {
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

PLAIT_INLINE void world::fail(const std::string& why) {
  const std::lock_guard lock(mutex_);
  fail_locked(why + flights());
}

PLAIT_INLINE void world::fail_here(const std::string& why) {
  fail_locked(why + flights());
  throw stopped(why);
}

PLAIT_INLINE void world::fail_by_unwinding(int rank) {
  const std::lock_guard lock(mutex_);
  if (failed()) return;
  unwinding_ = rank;
  fail_locked(cat({"rank ", rank, " is leaving by an exception"}));
}

PLAIT_INLINE void world::leave(int rank, std::exception_ptr exception, const std::string& what) {
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

PLAIT_INLINE void world::throw_stopped(int rank, const std::string& doing, const std::string& cause) const {
  throw stopped(cat({"rank ", rank, ": ", doing, " was stopped: ", cause}));
}

PLAIT_INLINE std::string world::cause() {
  const std::lock_guard lock(mutex_);
  return cause_;
}

PLAIT_INLINE bool world::all_gone() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const slot& s) { return s.gone; });
}

PLAIT_INLINE void world::fail_locked(const std::string& why) {
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

PLAIT_INLINE bool world::wait_for_completion(slot& me, operation& op) {
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

PLAIT_INLINE std::string world::situation() {
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

PLAIT_INLINE std::string world::flights() {
  std::string out = "\nlast operations";
  for (int r = 0; r < size(); ++r) append(out, {"\n  rank ", r, ": ", slot_of(r).flight.text()});
  return out;
}

PLAIT_INLINE std::string world::describe(const operation& op, int rank) {
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

}  // namespace plait::threads::detail

#include "plait/core/macros_on.hpp"
