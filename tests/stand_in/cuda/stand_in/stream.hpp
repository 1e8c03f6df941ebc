// Streams, events and captures. A queued operation waits until the program asks for its result: operations run as late
// as CUDA allows, so a forgotten synchronisation always shows. With PLAIT_STAND_IN_STREAMS=eager they run at once, with
// random some of them run at every call, which shows memory that is reused too early. (The default is late.) All
// functions take one lock.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "api_types.hpp"
#include "arena.hpp"
#include "block.hpp"
#include "clock.hpp"
#include "operations.hpp"

namespace stand_in {

inline stream_order streams_from_environment() {
  const char* text = std::getenv("PLAIT_STAND_IN_STREAMS");
  const std::string_view order = text ? text : "late";
  if (order == "late" || order.empty()) return stream_order::late;
  if (order == "eager") return stream_order::eager;
  if (order == "random") return stream_order::random;
  die("PLAIT_STAND_IN_STREAMS is '" + std::string(order) + "'; legal are late, eager and random");
}

class runtime {
 public:
  static runtime& instance() {
    static auto* one = new runtime;
    return *one;
  }

  std::recursive_mutex mutex;
  std::condition_variable_any met;                       // signals that all parts of a meeting are in streams
  std::unordered_map<CUstream_st*, stream_ptr> streams;  // destroyed ones stay until their operations have run
  std::unordered_map<CUevent_st*, std::unique_ptr<CUevent_st>> events;
  std::unordered_map<CUgraph_st*, std::unique_ptr<CUgraph_st>> graphs;
  std::unordered_map<CUgraphExec_st*, std::unique_ptr<CUgraphExec_st>> executables;
  std::unordered_map<CUmemPoolHandle_st*, std::unique_ptr<CUmemPoolHandle_st>> pools;
  std::map<int, cudaMemPool_t> default_pools;
  std::map<const char*, std::size_t> pinned;                  // start and bytes
  std::unordered_map<const void*, int> dynamic_shared_limit;  // by kernel
  std::set<const void*> loaded;                               // kernels that were launched or whose attributes were set
  bool executing = false;
  stream_order order = streams_from_environment();
  virtual_clock clock;

  /// Null if the handle is not a stream.
  stream_ptr find(cudaStream_t handle) {
    if (handle == nullptr || handle == cudaStreamLegacy) return legacy(current_device);
    const auto it = streams.find(handle);
    return it == streams.end() || it->second->destroyed ? nullptr : it->second;
  }
  CUevent_st* find(cudaEvent_t handle) {
    const auto it = events.find(handle);
    return it == events.end() ? nullptr : it->second.get();
  }

  bool is_pool(cudaMemPool_t pool) const {
    const auto it = pools.find(pool);
    return it != pools.end() && !it->second->destroyed;
  }
  bool is_pinned(const void* p) const {
    const auto* c = static_cast<const char*>(p);
    auto it = pinned.upper_bound(c);
    if (it == pinned.begin()) return false;
    --it;
    return c < it->first + it->second;
  }

  /// Notes that the next operation that is queued or captured uses the memory at `p`. Memory that is free, or whose
  /// release is queued, ends the process.
  void will_use(const void* p, std::string_view who) {
    next_.who = who;
    if (is_pinned(p)) return next_.of.push_back({static_cast<const char*>(p), 0});
    if (!arena::instance().contains(p)) return;
    const char* start = nullptr;
    const arena::allocation* const a = arena::instance().with_end(p, &start);
    if (!a || a->freeing) die(std::string(who) + " is handed device memory that was freed, or never allocated");
    next_.of.push_back({start, a->number});
  }
  /// Does this for a word of an argument, which may be an address.
  void may_use(const void* p, std::string_view who) {
    const char* start = nullptr;
    if (!arena::instance().contains(p)) return;
    next_.who = who;
    if (const auto* a = arena::instance().with_end(p, &start)) next_.of.push_back({start, a->number});
  }
  /// Does this for a node of a graph, whose memory must exist at every launch.
  void will_use_again(const uses& memory) {
    for (const use& u : memory.of) {
      const char* start = nullptr;
      const arena::allocation* const a = u.number ? arena::instance().with_end(u.at, &start) : nullptr;
      if (u.number ? !a || a->number != u.number || a->freeing : !is_pinned(u.at))
        die("a graph is launched whose memory was freed: " + std::string(memory.who));
    }
    next_ = memory;
  }
  void forget_uses() { next_ = {}; }
  /// The first operation in flight that uses memory in a range, and its stream; null if none does.
  const operation* user_of(const char* begin, std::size_t bytes, stream_ptr* where = nullptr) const {
    for (const auto& [handle, s] : streams) {
      for (const operation& o : s->queue) {
        const auto inside = [&](const use& u) { return u.at >= begin && u.at < begin + bytes; };
        if (!o.touches() || std::none_of(o.memory.of.begin(), o.memory.of.end(), inside)) continue;
        if (where) *where = s;
        return &o;
      }
    }
    return nullptr;
  }
  /// Ends the process if an operation in flight uses memory that is freed.
  void must_be_unused(const char* begin, std::size_t bytes, const char* freeing) const {
    if (const operation* const o = user_of(begin, bytes))
      die(std::string(freeing) + " frees " + std::to_string(bytes) +
          " bytes that an operation in flight uses: " + std::string(o->memory.who));
  }

  cudaError_t enqueue(const stream_ptr& s, std::function<void()> run, const task& what = {},
                      std::vector<dependency> after = {}) {
    if (s->captured_by) return record(s, {std::move(run), nullptr, what, s.get(), {}, {}});
    const stream_ptr old = legacy(s->device);
    if (s == old) {
      for (auto& [handle, other] : streams) {
        if (other == s || !other->blocking || other->device != s->device) continue;
        if (other->captured_by) {
          other->captured_by->invalid = true;
          return cudaErrorStreamCaptureImplicit;
        }
        if (other->executed < other->enqueued) after.push_back({other, other->enqueued});
      }
    } else if (s->blocking && old->executed < old->enqueued) {
      after.push_back({old, old->enqueued});
    }
    s->queue.push_back({std::move(run), std::move(after), {}, std::exchange(next_, {})});
    ++s->enqueued;
    if (clock.on()) take_time(s, what);
    return cudaSuccess;
  }

  /// Adds a node to the graph that captures `s`.
  cudaError_t record(const stream_ptr& s, graph_node node) {
    capture& c = *s->captured_by;
    if (c.invalid) return cudaErrorStreamCaptureInvalidated;
    node.memory = std::exchange(next_, {});
    c.operations.push_back(std::move(node));
    s->seen[s.get()] = ++c.issued[s.get()];
    return cudaSuccess;
  }

  /// Adds the record of an event, or the wait for one, that has no node in a graph. Only the clock uses it.
  void note(const stream_ptr& s, const graph_moment& m) {
    if (!s->captured_by->invalid) s->captured_by->operations.push_back({nullptr, nullptr, {}, s.get(), m, {}});
  }

  /// Queues a part of each of `meetings` in a stream. All of them start together when the stream reaches them.
  void join(const stream_ptr& s, std::vector<std::shared_ptr<meeting>> meetings) {
    static_cast<void>(enqueue(s, [] {}));
    bool complete = false;
    for (const auto& m : meetings) {
      m->before.push_back({s, s->enqueued - 1});
      complete = --m->missing == 0 || complete;
    }
    s->queue.back().meetings = std::move(meetings);
    if (complete) met.notify_all();
  }

  /// Runs a stream's operations up to the `count`th, after those that each waits for. Stops early at a meeting with a
  /// part that another thread has not queued yet.
  bool advance(const stream_ptr& s, std::uint64_t count) {
    if (s->executed >= count) return true;
    const bool outermost = !executing;
    if (outermost) {
      executing = true;
      arena::instance().open();
    }
    if (outermost) circle_ = false;
    circle_ = circle_ || s->in_flight;
    bool ready = !s->in_flight;
    while (ready && s->executed < count) {
      ready = comes_to(s);
      if (!ready) break;
      const operation next = std::move(s->queue.front());
      s->queue.pop_front();
      next.run();
      ++s->executed;
    }
    if (ready) s->polls = 0;
    if (outermost) {
      arena::instance().close();
      executing = false;
      forget_destroyed();
    }
    return ready;
  }
  /// Runs them to the end, for a call that may wait for other threads' parts.
  void settle(const stream_ptr& s, std::uint64_t count) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(100);
    while (!advance(s, count)) {
      if (std::chrono::steady_clock::now() > end)
        die("a stream has waited 100 s for other ranks' parts of a collective or message");
      met.wait_for(mutex, std::chrono::seconds(1));  // also ends after an abort
    }
  }
  bool finish(const stream_ptr& s) { return advance(s, s->enqueued); }
  void settle(const stream_ptr& s) { settle(s, s->enqueued); }
  void settle_all(int device) {
    for (const stream_ptr& s : all()) {
      if (s->device == device) settle(s);
    }
  }
  /// Runs the operations of all streams that can run.
  void finish_all() {
    for (const stream_ptr& s : all()) finish(s);
  }

  /// Runs some operations, as a GPU does between two calls.
  void run_some() {
    if (order == stream_order::late || executing) return;
    for (const stream_ptr& s : all()) {
      if (s->executed == s->enqueued) continue;
      const std::uint64_t waiting = s->enqueued - s->executed;
      advance(s, s->executed + (order == stream_order::eager ? waiting : random_() % (waiting + 1)));
    }
  }

  /// Runs all operations of a stream, for a call that waits.
  void await(const stream_ptr& s) {
    settle(s);
    if (clock.on()) clock.host_waits(s->at);
  }

  /// Starts the clock at zero; stops it if `cost` is empty.
  void set_clock(cost_function cost) {
    const std::lock_guard lock(mutex);
    clock.set(std::move(cost));
    for (auto& [handle, s] : streams) s->at = 0;
    for (auto& [handle, e] : events) e->at = 0;
  }

  /// The error of a call that waits, or uses something that a capture forbids. `s`: the stream waited for; null: all of
  /// them.
  cudaError_t refuse_while_capturing(const CUstream_st* s) {
    if (s) {
      if (!s->captured_by) return cudaSuccess;
      s->captured_by->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
    for (auto& [handle, other] : streams) {
      if (!other->captured_by) continue;
      other->captured_by->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
    return cudaSuccess;
  }
  /// The error of a call that is unsafe while this thread captures in any mode except relaxed, or another one in the
  /// global mode. The mode of this thread may be less strict.
  cudaError_t refuse_unsafe() {
    cudaError_t error = cudaSuccess;
    if (capture_mode == cudaStreamCaptureModeRelaxed) return error;
    const auto refuse = [&](capture& c) {
      if (c.ended || c.mode == cudaStreamCaptureModeRelaxed) return;
      c.invalid = true;
      error = cudaErrorStreamCaptureUnsupported;
    };
    for (const auto& c : captures_of_thread) refuse(*c);
    if (capture_mode == cudaStreamCaptureModeThreadLocal) return error;
    for (auto& [handle, s] : streams) {
      if (s->captured_by && s->captured_by->mode == cudaStreamCaptureModeGlobal) refuse(*s->captured_by);
    }
    return error;
  }

  stream_ptr legacy(int device) {
    stream_ptr& s = legacy_[device];
    if (!s) {
      s = std::make_shared<CUstream_st>();
      s->device = device;
      streams.emplace(s.get(), s);
    }
    return s;
  }

 private:
  std::vector<stream_ptr> all() const {
    std::vector<stream_ptr> list;
    for (const auto& [handle, s] : streams) list.push_back(s);
    return list;
  }
  /// Runs other streams until the first operation of `s` can run; false if that needs another thread.
  bool comes_to(const stream_ptr& s) {
    s->in_flight = true;
    bool ready = true;
    const operation& next = s->queue.front();
    for (const auto& m : next.meetings) ready = ready && (m->missing == 0 || m->given_up());
    for (const dependency& d : next.after) ready = ready && advance(d.stream, d.count);
    for (const auto& m : next.meetings) ready = ready && hold(*m);
    s->in_flight = false;
    return ready;
  }
  /// Runs a meeting, unless it has run; false if that needs another thread.
  bool hold(meeting& m) {
    if (m.done || m.given_up()) return true;
    if (m.missing > 0) return false;
    for (const dependency& d : m.before) {
      if (advance(d.stream, d.count)) continue;
      if (circle_) m.refuse("deadlock: streams wait for each other");
      return false;
    }
    m.run();
    return m.done = true;
  }
  void forget_destroyed() {
    std::erase_if(streams,
                  [](const auto& s) { return s.second->destroyed && s.second->executed == s.second->enqueued; });
  }

  /// Advances the stream's time by an operation, which starts when the stream and the host are ready.
  void take_time(const stream_ptr& s, const task& what) {
    const stream_ptr old = legacy(s->device);
    if (s == old) {
      for (auto& [handle, other] : streams) {
        if (other->blocking && other->device == s->device) s->at = std::max(s->at, other->at);
      }
    } else if (s->blocking) {
      s->at = std::max(s->at, old->at);
    }
    s->at = std::max(s->at, clock.host()) +
            (is_library ? 0 : clock.cost(what));  // a library reports the time of its work itself
    clock.host_calls();
  }

  std::map<int, stream_ptr> legacy_;
  uses next_;            // of the next operation
  bool circle_ = false;  // an operation waits for a later one of its stream
  std::minstd_rand random_{seed_from_environment()};
};

/// The frame of every function of the interface: takes the lock, refuses calls from host functions, keeps the error.
template <class Body>
cudaError_t call(Body body) {
  runtime& r = runtime::instance();
  const std::lock_guard lock(r.mutex);
  if (device_count() == 0) return fail(cudaErrorNoDevice);
  if (is_taken(current_device)) return fail(cudaErrorDevicesUnavailable);
  if (!device_chosen) ++calls_without_device;
  if (r.executing) return fail(cudaErrorNotPermitted);
  r.forget_uses();
  const cudaError_t error = body(r);
  r.run_some();
  return fail(error);
}

/// The same for a function on a stream, which the body gets; refuses a handle that is no stream's.
template <class Body>
cudaError_t call_on(cudaStream_t stream, Body body) {
  return call([&](runtime& r) {
    const stream_ptr s = r.find(stream);
    return s ? body(r, s) : cudaErrorInvalidResourceHandle;
  });
}

/// For libraries and tests: the clock's time at the end of a stream's queued operations.
inline double time_of(cudaStream_t stream) {
  runtime& r = runtime::instance();
  const std::lock_guard lock(r.mutex);
  const stream_ptr s = r.find(stream);
  return s ? s->at : 0;
}
inline void set_time(cudaStream_t stream, double at) {
  runtime& r = runtime::instance();
  const std::lock_guard lock(r.mutex);
  if (const stream_ptr s = r.find(stream)) s->at = at;
}
/// The time of an operation; 0 while the clock is off.
inline double cost_of(const task& what) {
  runtime& r = runtime::instance();
  const std::lock_guard lock(r.mutex);
  return r.clock.on() ? r.clock.cost(what) : 0;
}

}  // namespace stand_in
