// Virtual time: when a GPU with as many units as there are streams would have done what they hold, where a test says
// what each operation takes. It is off unless a test starts it, and then changes what polls find, and nothing else.
// Times follow from what is put into streams, not from when the stand-in runs it or how the host's threads take turns.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace stand_in {

/// What an operation is to the clock, and its size: flops of products, threads of kernels, bytes of the others, for
/// NCCL's those of one rank's block. What orders streams, or takes and gives back memory, takes no time.
enum class work { none, kernel, product, copy, fill, collective, message };
struct task {
  work kind = work::none;
  double size = 0;
};
using cost_function = std::function<double(const task&)>;

/// A place in a graph where an event is recorded, or waited for.
struct graph_moment {
  enum class role { none, record, wait } what = role::none;
  std::size_t event = 0;
};

/// The clock and the times of the host's threads. Those of streams and events are theirs. The unit is the cost
/// function's. Guarded by the runtime's lock, but for what a thread has.
class virtual_clock {
 public:
  bool on() const { return static_cast<bool>(cost_); }
  void set(cost_function cost) {
    cost_ = std::move(cost);
    ++runs_;
  }
  double cost(const task& what) const { return what.kind == work::none ? 0 : cost_(what); }

  /// The time of this thread. A call takes none; to wait for a stream takes until the stream is there.
  double host() { return mine().at; }
  void host_waits(double until) { mine() = {runs_, std::max(mine().at, until), 0}; }
  void host_calls() { mine().polls = 0; }
  /// Whether the host finds that `at` is over. Whoever asks again and again, and does nothing else, comes to see it.
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

/// The times of one replay of a graph: its streams run side by side, though the stand-in puts all into one.
class replay_times {
 public:
  explicit replay_times(double start) : start_(start) {}

  /// The time of a stream of the recording, which begins with the replay.
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
