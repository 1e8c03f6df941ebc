#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plait/core/error.hpp"

namespace plait::test {

/// What support/mailbox.hpp stands on, as other communicators stand on MPI or NCCL: boxes with names, into which any
/// thread puts letters, and out of which any takes them, the oldest first.
class post_office {
 public:
  using letter = std::vector<std::byte>;

  void put(const std::string& box, const void* data, std::size_t bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    const std::lock_guard lock(mutex_);
    boxes_[box].emplace_back(from, from + bytes);
    changed_.notify_all();
  }
  letter take(const std::string& box) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !closed_.empty() || !boxes_[box].empty(); });
    if (!closed_.empty()) fail({"the post office is closed: ", closed_});
    letter out = std::move(boxes_[box].front());
    boxes_[box].pop_front();
    return out;
  }
  bool has(const std::string& box) {
    const std::lock_guard lock(mutex_);
    return !closed_.empty() || !boxes_[box].empty();
  }
  /// 1, 2, 3, ... for each name.
  int next(const std::string& name) {
    const std::lock_guard lock(mutex_);
    return ++counts_[name];
  }
  /// Whoever waits gets an error, with the first reason.
  void close(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (closed_.empty()) closed_ = why;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::deque<letter>> boxes_;
  std::map<std::string, int> counts_;
  std::string closed_;
};

/// Somebody waits for the next letter of a box, whose bytes go to `to`.
struct awaited_letter {
  std::shared_ptr<post_office> office;
  std::string box;
  std::byte* to;

  bool here() const { return office->has(box); }
  void take() const {
    const post_office::letter got = office->take(box);
    if (!got.empty()) std::memcpy(to, got.data(), got.size());
  }
  void drop() const noexcept {
    try {
      take();
    } catch (const error&) {  // the office is closed: the next operation says why
    }
  }
};

/// Runs body(office, rank) on `ranks` threads with one post office; throws the first error of any.
template <class F>
void run_with_office(int ranks, const F& body) {
  const auto office = std::make_shared<post_office>();
  std::exception_ptr first;
  std::mutex once;
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        body(office, r);
      } catch (const std::exception& e) {
        {
          const std::lock_guard lock(once);
          if (!first) first = std::current_exception();
        }
        office->close(e.what());
      }
    });
  for (std::thread& t : threads) t.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace plait::test
