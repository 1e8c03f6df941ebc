#pragma once

// Calls, single or in groups: code that posts them, waits for them, or adds them to a graph.

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "meetings.hpp"

namespace plait::nccl_stand_in {

/// A posted operation that must be waited for.
struct issued {
  ncclComm_t comm;
  cudaStream_t stream;
  int side;
  threads::detail::operation* op;  ///< null if the ranks meet in streams
  std::size_t bytes;               ///< of one rank's block
  const void *in, *out;
  std::shared_ptr<rendezvous> late = nullptr;
};
/// Makes a call on a stream: the caller's, or the stream in which the graph with the call is launched.
using poster = std::function<issued(cudaStream_t)>;
struct call_of {
  ncclComm_t comm;
  cudaStream_t stream;
  poster post;
  std::shared_ptr<int> recorded = nullptr;  ///< the communicator's, if a graph holds the call
};
struct open_group {
  int depth = 0;
  std::vector<call_of> calls;
  ncclResult_t failure = ncclSuccess;
};
inline open_group& group() {
  thread_local open_group g;
  return g;
}

/// While it exists, the thread may do what libraries may: record events of other GPUs.
struct inside_library {
#ifdef PLAIT_CUDA_STAND_IN
  inside_library() { ::stand_in::is_library = true; }
  ~inside_library() { ::stand_in::is_library = false; }
#else
  inside_library() {}
#endif
  inside_library(const inside_library&) = delete;
};

inline void finish(const issued& i) {
  if (i.op == nullptr) return;
  i.comm->engine->set_streams(i.stream, i.stream);
  i.comm->member->finish(i.op, i.side);
}

/// Sometimes reports that a call of a communicator that does not block is in progress.
inline ncclResult_t outcome(ncclComm_t comm) {
  if (comm->blocking || ++comm->calls % 3 != 0) return ncclSuccess;
  comm->busy = 2;
  return ncclInProgress;
}

inline ncclResult_t failed(const char* call, ncclComm_t comm, const std::exception& e) {
  const std::string text = std::string(call) + ": " + e.what();
  comm->ranks->run->fail("rank " + std::to_string(comm->world_rank) + ": " + text);
  const bool mine = dynamic_cast<const threads::stopped*>(&e) == nullptr || text.find("mismatched") != text.npos;
  return refuse(mine ? ncclInvalidUsage : ncclRemoteError, text, comm);
}

/// The clock's times of the streams of a group. Its operations start together when a stream reaches them: each when its
/// last rank does. All ranks of an operation end it at one time. Does nothing while the clock is off.
class group_times {
 public:
#ifdef PLAIT_CUDA_STAND_IN
  void begin(cudaStream_t stream) {
    const auto [place, is_new] = times_.try_emplace(stream);
    if (is_new) place->second.start = place->second.end = ::stand_in::time_of(stream);
    ::stand_in::set_time(stream, place->second.start);
  }
  void end(const issued& i) {
    using ::stand_in::work;
    const ::stand_in::task what{i.side < 0 ? work::collective : work::message, static_cast<double>(i.bytes)};
    double& end = times_[i.stream].end;
    end = std::max(end, ::stand_in::time_of(i.stream) + ::stand_in::cost_of(what));
  }
  ~group_times() {
    for (const auto& [stream, t] : times_) ::stand_in::set_time(stream, t.end);
  }

 private:
  struct span {
    double start = 0, end = 0;
  };
  std::map<cudaStream_t, span> times_;
#else
  void begin(cudaStream_t) {}
  void end(const issued&) {}
#endif
};

#ifdef PLAIT_CUDA_STAND_IN
/// Queues the parts of operations that meet in streams; all parts in one stream start together.
inline void join_streams(const std::vector<issued>& open) {
  std::map<cudaStream_t, std::vector<std::shared_ptr<::stand_in::meeting>>> parts;
  for (const issued& i : open) {
    // The rendezvous owns the buffers that the work of its meeting reads, so both have one owner.
    if (i.late != nullptr) parts[i.stream].emplace_back(i.late, i.late->in_streams.get());
  }
  auto& r = ::stand_in::runtime::instance();
  const std::lock_guard lock(r.mutex);
  for (auto& [stream, meetings] : parts) {
    const auto s = r.find(stream);
    if (s == nullptr) fail({"a call on a stream that was destroyed"});
    r.forget_uses();
    for (const issued& i : open)
      for (const void* const p : {i.in, i.out})
        if (i.late != nullptr && i.stream == stream && p != nullptr) r.will_use(p, "an operation of NCCL's");
    r.join(s, std::move(meetings));
  }
}
#endif

#ifdef PLAIT_CUDA_STAND_IN
/// Whether a call of the communicator that uses memory in a range (null: any call) is not over.
inline bool is_in_flight(ncclComm_t comm, const char* begin = nullptr, std::size_t bytes = 0) {
  const std::lock_guard lock(::stand_in::runtime::instance().mutex);
  for (const auto& one : comm->in_flight) {
    const auto inside = [&](const void* p) {
      return begin == nullptr || (static_cast<const char*>(p) >= begin && static_cast<const char*>(p) < begin + bytes);
    };
    if (one.pending() && (inside(one.in) || inside(one.out))) return true;
  }
  return false;
}
/// Whether a graph that still exists holds calls of the communicator.
inline bool is_recorded(ncclComm_t comm) { return comm->recorded.use_count() > 1; }
/// Runs the streams of calls in flight as far as possible.
inline void run_on(ncclComm_t comm) {
  const std::lock_guard lock(::stand_in::runtime::instance().mutex);
  const auto all = comm->in_flight;
  for (const auto& one : all)
    if (one.pending()) one.run_on();
}
inline void note_in_flight(const std::vector<issued>& open) {
  auto& r = ::stand_in::runtime::instance();
  const std::lock_guard lock(r.mutex);
  for (const issued& i : open) {
    const auto s = r.find(i.stream);
    auto& all = i.comm->in_flight;
    std::erase_if(all, [](const auto& one) { return !one.pending(); });
    if (s == nullptr) continue;
    all.push_back({[s, until = s->enqueued] { return s->executed < until; }, [s, &r] { r.finish(s); }, i.in, i.out});
  }
}
#endif

/// Posts all calls, then waits for all. `stream`: that of a graph's launch; null: each call's own.
inline ncclResult_t make(const char* name, const std::vector<call_of>& calls, cudaStream_t stream) {
  std::vector<issued> open;
  ncclComm_t now = nullptr;
  const inside_library inside;
  group_times times;
  try {
    for (const call_of& c : calls) {
      const cudaStream_t on = stream != nullptr ? stream : c.stream;
      times.begin(on);
      open.push_back((now = c.comm, c.post(on)));
    }
#ifdef PLAIT_CUDA_STAND_IN
    join_streams(open);
#endif
    for (const issued& i : open) {
      times.begin(i.stream);
      now = i.comm, finish(i);
      times.end(i);
    }
#ifdef PLAIT_CUDA_STAND_IN
    if (stream == nullptr) note_in_flight(open);  // a replay belongs to no call
#endif
  } catch (const std::exception& e) {
    return failed(name, now, e);
  }
  return ncclSuccess;
}

/// Makes the calls now or, if their streams are being captured, at every launch of the graph.
inline ncclResult_t make_or_record(const char* name, std::vector<call_of> calls) {
  if (calls.empty()) return ncclSuccess;
  for (const call_of& c : calls) {
    cudaStreamCaptureStatus first{}, other{};
    if (cudaStreamIsCapturing(calls.front().stream, &first) != cudaSuccess ||
        cudaStreamIsCapturing(c.stream, &other) != cudaSuccess || first != other) {
      return refuse(ncclInvalidUsage, std::string(name) + ": streams of one group, and not all are recorded", c.comm);
    }
  }
  const ncclComm_t comm = calls.front().comm;
  const cudaStream_t stream = calls.front().stream;
  bool recorded = false;
#ifdef PLAIT_CUDA_STAND_IN
  std::vector<call_of> kept = calls;
  for (call_of& c : kept) c.recorded = c.comm->recorded;
  const auto again = [name, kept = std::move(kept)](cudaStream_t s) { return make(name, kept, s) == ncclSuccess; };
  const cudaError_t status = ::stand_in::record_if_capturing(stream, again, &recorded);
#else
  cudaStreamCaptureStatus now{};
  const cudaError_t status = cudaStreamIsCapturing(stream, &now);
  if (now != cudaStreamCaptureStatusNone) {
    return refuse(ncclInvalidUsage, std::string(name) + ": these ranks meet on the host, which no graph can", comm);
  }
#endif
  if (status != cudaSuccess) {
    return refuse(ncclUnhandledCudaError, std::string(name) + ": the stream cannot be recorded", comm);
  }
  return recorded ? ncclSuccess : make(name, calls, nullptr);
}

inline ncclResult_t enqueue(const char* call, ncclComm_t comm, cudaStream_t stream, poster post) {
  const ncclResult_t ready = usable(call, comm);
  if (ready != ncclSuccess) return group().depth > 0 ? group().failure = ready : ready;
  if (group().depth > 0) {
    group().calls.push_back({comm, stream, std::move(post)});
    return ncclSuccess;
  }
  const ncclResult_t made = make_or_record(call, {{comm, stream, std::move(post)}});
  return made == ncclSuccess ? outcome(comm) : made;
}

inline ncclResult_t group_start() {
  ++group().depth;
  return ncclSuccess;
}
inline ncclResult_t group_end() {
  open_group& g = group();
  if (g.depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--g.depth > 0) return ncclSuccess;
  const auto calls = std::exchange(g.calls, {});
  if (const ncclResult_t failure = std::exchange(g.failure, ncclSuccess); failure != ncclSuccess) return failure;
  if (const ncclResult_t made = make_or_record("ncclGroupEnd", calls); made != ncclSuccess) return made;
  ncclResult_t result = ncclSuccess;
  std::set<ncclComm_t> comms;
  for (const call_of& c : calls) comms.insert(c.comm);
  for (const ncclComm_t comm : comms) {
    if (outcome(comm) == ncclInProgress) result = ncclInProgress;
  }
  return result;
}

}  // namespace plait::nccl_stand_in
