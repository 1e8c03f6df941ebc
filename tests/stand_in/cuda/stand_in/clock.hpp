// Virtual time: the time at which a GPU that runs all streams in parallel would have finished their operations, from
// costs that a test gives. It is off unless a test starts it; then it changes only the results of polls. Times depend
// on the operations in streams only, not on when the stand-in runs them or how the host schedules threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace stand_in {

/// The kind of an operation for the clock. Its size: flops of products, threads of kernels, bytes of the others (for
/// NCCL, of one rank's block). Operations that order streams, or allocate and release memory, take no time.
enum class work { none, kernel, product, copy, fill, collective, message };
struct task {
  work kind = work::none;
  double size = 0;
};
using cost_function = std::function<double(const task&)>;

/// A place in a graph where an event is recorded or waited for.
struct graph_moment {
  enum class role { none, record, wait } what = role::none;
  std::size_t event = 0;
};

/// The clock and the times of the host's threads. Streams and events store their own times. The unit is the cost
/// function's. Requires the runtime's lock, except for a thread's own time.
class virtual_clock {
 public:
  bool on() const { return static_cast<bool>(cost_); }
  void set(cost_function cost) {
    cost_ = std::move(cost);
    ++runs_;
  }
  double cost(const task& what) const { return what.kind == work::none ? 0 : cost_(what); }

  /// The time of this thread. A call takes no time; waiting for a stream takes until the stream finishes.
  double host() { return mine().at; }
  void host_waits(double until) { mine() = {runs_, std::max(mine().at, until), 0}; }
  void host_calls() { mine().polls = 0; }
  /// Whether the host sees that `at` has passed. A thread that only polls sees it after a few polls.
  bool passed(double at) {
    if (mine().at < at && ++mine().polls <= 3) return false;
    host_waits(at);
    return true;
  }

 private:
  struct thread_time {
    unsigned run = 0;
    double at = 0;
    int polls = 0;
  };
  thread_time& mine() {
    thread_local thread_time t;
    if (t.run != runs_) t = {runs_, 0, 0};
    return t;
  }

  cost_function cost_;
  unsigned runs_ = 0;
};

/// The times of one replay of a graph: its streams run in parallel, although the stand-in puts all into one.
class replay_times {
 public:
  explicit replay_times(double start) : start_(start) {}

  /// The time of a captured stream, which starts with the replay.
  double& of(const void* recorded_stream) { return streams_.try_emplace(recorded_stream, start_).first->second; }
  void pass(const void* recorded_stream, const graph_moment& m) {
    if (events_.size() <= m.event) events_.resize(m.event + 1, start_);
    double &at = of(recorded_stream), &event = events_[m.event];
    if (m.what == graph_moment::role::record) event = at;
    if (m.what == graph_moment::role::wait) at = std::max(at, event);
  }
  double end() const {
    double last = start_;
    for (const auto& [stream, at] : streams_) last = std::max(last, at);
    return last;
  }

 private:
  double start_;
  std::map<const void*, double> streams_;
  std::vector<double> events_;
};

}  // namespace stand_in
