// Deadlines for operations, shared by the backends: a deadline, the thread that watches deadlines, the one cause that
// ends all ranks, and the texts of these errors.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/metrics.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

namespace plait::detail {

/// Returns "rank 3", or "ranks 0 to 2, 5".
inline std::string ranks_text(const std::vector<std::size_t>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0, runs = 0; i < ranks.size(); ++runs) {
    if (runs == 8) return cat({text, " and ", ranks.size() - i, " more"});
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;
    append(text, {(i == 0 ? "" : ", "), ranks[i]});
    if (end - i > 1) append(text, {" to ", ranks[end - 1]});
    i = end;
  }
  return text;
}

/// Returns "all_reduce #3 on 'dp'".
inline std::string operation_text(std::string_view name, std::uint64_t sequence, std::string_view label) {
  return cat({name, " #", sequence, " on '", label, "'"});
}

inline constexpr const char* someone_is_missing = "a rank of the group is lost or has not called it";

/// Returns the text of an operation that is past its deadline; `detail` is its size or its call.
inline std::string late_text(const std::string& operation, std::string_view detail, double seconds,
                             std::string_view who) {
  return cat({operation, " (", detail, ") did not finish within its deadline of ", seconds, " s: ", who});
}

/// Returns the text of the exception that is being handled.
inline std::string exception_text() {
  try {
    throw;
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

/// A time limit that starts at construction. 0: no limit.
class deadline {
 public:
  explicit deadline(double seconds) : seconds_(seconds), begin_(comm_clock()) {}
  /// Whether more than `share` of the time is over.
  bool passed(double share = 1) const { return seconds_ > 0 && comm_clock() - begin_ > share * seconds_; }

 private:
  double seconds_, begin_;
};

/// A thread that calls `look` ten times in the shortest deadline that it covers, and at least once a second. It locks
/// the owner's `mutex` before the call. `look` may unlock it for a while, and returns whether to continue.
class watch_thread {
 public:
  watch_thread(std::mutex& mutex, std::function<bool(std::unique_lock<std::mutex>&)> look)
      : mutex_(mutex), look_(std::move(look)) {}
  watch_thread(const watch_thread&) = delete;
  watch_thread& operator=(const watch_thread&) = delete;
  ~watch_thread() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  /// Covers a deadline; the first call starts the thread. Requires the mutex.
  void cover(double seconds) {
    if (seconds > 0 && seconds / 10 < tick_) {
      tick_ = seconds / 10;
      wake();
    }
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  /// Calls `look` at once. Requires the mutex.
  void wake() {
    awake_ = true;
    changed_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    do {
      changed_.wait_for(lock, std::chrono::duration<double>(tick_), [this] { return awake_ || over_; });
      awake_ = false;
    } while (look_(lock) && !over_);
  }

  std::mutex& mutex_;
  std::function<bool(std::unique_lock<std::mutex>&)> look_;
  std::condition_variable changed_;
  double tick_ = 1;
  bool awake_ = false, over_ = false;
  std::thread thread_;
};

/// The cause that ends all ranks of a process. Only the first one counts. The owner's mutex guards all members but
/// `failed`.
class failure {
 public:
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  const std::string& cause() const { return cause_; }
  /// Sets the cause, and returns whether it is the first. `leaving` is a rank that an exception unwinds; `explain` adds
  /// its text later.
  bool fail(const std::string& why, int leaving = -1) {
    if (failed()) return false;
    cause_ = why;
    leaving_ = leaving;
    failed_.store(true, std::memory_order_release);
    return true;
  }
  /// Adds the text of the exception that ended `rank`. Returns false unless this rank was leaving and is the cause.
  bool explain(int rank, const std::string& why) {
    if (leaving_ != rank) return false;
    cause_ = why;
    leaving_ = -1;
    return true;
  }

 private:
  std::atomic<bool> failed_{false};
  std::string cause_;
  int leaving_ = -1;
};

/// Runs `rank_main` on one thread per rank, and waits for all. If a thread cannot start, `stop` ends the others.
inline void run_rank_threads(std::string_view caller, std::size_t ranks, const std::function<void(int)>& rank_main,
                             const std::function<void(const std::string&)>& stop) {
  std::vector<std::thread> threads;
  try {
    threads.reserve(ranks);
    for (std::size_t r = 0; r < ranks; ++r) threads.emplace_back(rank_main, static_cast<int>(r));
  } catch (const std::exception& e) {
    stop(cat({caller, ": only ", threads.size(), " of ", ranks, " threads could be started: ", e.what()}));
  }
  for (std::thread& t : threads) t.join();
}

/// Throws the cause that ended the ranks. If a rank threw it, that exception is nested in this one.
[[noreturn]] inline void throw_cause(const std::string& cause, const std::exception_ptr& of_rank) {
  if (of_rank == nullptr) throw error(cause);
  try {
    std::rethrow_exception(of_rank);
  } catch (...) {
    std::throw_with_nested(error(cause));
  }
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
