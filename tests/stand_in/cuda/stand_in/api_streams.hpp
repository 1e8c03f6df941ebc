// The runtime's functions on streams, events, captures and graphs.
#pragma once

#include "stream.hpp"

// ---- streams -------------------------------------------------------------------------------------------------------

inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!stream || flags > cudaStreamNonBlocking) return cudaErrorInvalidValue;
    auto s = std::make_shared<CUstream_st>();
    s->device = stand_in::current_device;
    s->blocking = flags != cudaStreamNonBlocking;
    s->priority = priority;
    *stream = s.get();
    r.streams.emplace(s.get(), s);
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

/// Returns at once, as CUDA's does: what the stream still holds runs later.
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return stand_in::call([&](stand_in::runtime& r) {
    if (!stream) return cudaErrorInvalidResourceHandle;
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s->captured_by) s->captured_by->invalid = true;
    s->destroyed = true;
    if (s->executed == s->enqueued) r.streams.erase(stream);
    return cudaSuccess;
  });
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (const auto error = r.refuse_while_capturing(s.get())) return error;
    r.finish(s);
    return cudaSuccess;
  });
}

inline cudaError_t cudaDeviceSynchronize() {
  return stand_in::call([&](stand_in::runtime& r) {
    if (const auto error = r.refuse_while_capturing(nullptr)) return error;
    r.finish_all(stand_in::current_device);
    stand_in::arena::instance().open();
    stand_in::arena::instance().check_guards();
    stand_in::arena::instance().close();
    return cudaSuccess;
  });
}

namespace stand_in {

/// Not ready for the first polls, whatever the state; then the work is done, so that loops which poll end.
template <class Finish>
cudaError_t poll(int& polls, bool done, Finish finish) {
  if (done) return cudaSuccess;
  if (++polls <= 3) return cudaErrorNotReady;
  polls = 0;
  finish();
  return cudaSuccess;
}

}  // namespace stand_in

inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (const auto error = r.refuse_while_capturing(s.get())) return error;
    return stand_in::poll(s->polls, s->executed == s->enqueued, [&] { r.finish(s); });
  });
}

inline cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    *priority = s->priority;
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    *flags = s->blocking ? cudaStreamDefault : cudaStreamNonBlocking;
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    *device = s->device;
    return cudaSuccess;
  });
}

inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    return r.enqueue(s, [function, data] {
      stand_in::arena::instance().close();  // host code has no business there
      function(data);
      stand_in::arena::instance().open();
    });
  });
}

// ---- events --------------------------------------------------------------------------------------------------------

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return stand_in::call([&](stand_in::runtime& r) {
    auto e = std::make_unique<CUevent_st>();
    e->device = stand_in::current_device;
    e->timing = !(flags & cudaEventDisableTiming);
    *event = e.get();
    r.events.emplace(e.get(), std::move(e));
    return cudaSuccess;
  });
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned flags = cudaEventDefault) {
  return cudaEventCreateWithFlags(event, flags);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return stand_in::call(
      [&](stand_in::runtime& r) { return r.events.erase(event) ? cudaSuccess : cudaErrorInvalidResourceHandle; });
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    CUevent_st* e = r.find(event);
    if (!s || !e || (e->device != s->device && !stand_in::is_library)) return cudaErrorInvalidResourceHandle;
    e->polls = 0;
    if (s->captured_by) {
      if (s->captured_by->invalid) return cudaErrorStreamCaptureInvalidated;
      e->captured_by = s->captured_by;
      e->seen = s->seen;
      return cudaSuccess;
    }
    auto time = std::make_shared<stand_in::event_time>();
    if (const auto error = r.enqueue(s, [time] { *time = std::chrono::steady_clock::now(); })) return error;
    e->captured_by = nullptr;
    e->recorded = true;
    e->point = {s, s->enqueued};
    e->time = std::move(time);
    return cudaSuccess;
  });
}

inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    const CUevent_st* e = r.find(event);
    if (!s || !e) return cudaErrorInvalidResourceHandle;
    if (e->captured_by) {
      if (e->captured_by->ended || e->captured_by->invalid) return cudaErrorCapturedEvent;
      if (s->captured_by && s->captured_by != e->captured_by) {
        s->captured_by->invalid = e->captured_by->invalid = true;
        return cudaErrorStreamCaptureMerge;
      }
      if (!s->captured_by) {
        s->captured_by = e->captured_by;
        s->seen.clear();
        s->captured_by->issued[s.get()] = s->captured_by->issued[s.get()];  // it has to join, even if it does nothing
        s->seen[s.get()] = ++s->captured_by->issued[s.get()];
      }
      for (const auto& [other, count] : e->seen) s->seen[other] = std::max(s->seen[other], count);
      return cudaSuccess;
    }
    if (s->captured_by) {
      if (!e->recorded) return cudaSuccess;
      s->captured_by->invalid = true;
      return cudaErrorStreamCaptureIsolation;
    }
    if (!e->recorded) return cudaSuccess;
    return r.enqueue(s, [] {}, {e->point});
  });
}

inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return stand_in::call([&](stand_in::runtime& r) {
    const CUevent_st* e = r.find(event);
    if (!e) return cudaErrorInvalidResourceHandle;
    if (e->captured_by) {
      e->captured_by->invalid = true;
      return cudaErrorCapturedEvent;
    }
    if (e->recorded) r.advance(e->point.stream, e->point.count);
    return cudaSuccess;
  });
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  return stand_in::call([&](stand_in::runtime& r) {
    CUevent_st* e = r.find(event);
    if (!e) return cudaErrorInvalidResourceHandle;
    if (e->captured_by) {
      e->captured_by->invalid = true;
      return cudaErrorCapturedEvent;
    }
    if (const auto error = r.refuse_unsafe()) return error;
    if (stand_in::lost_device != cudaSuccess) return stand_in::lost_device.load();
    const bool done = !e->recorded || e->point.stream->executed >= e->point.count;
    return stand_in::poll(e->polls, done, [&] { r.advance(e->point.stream, e->point.count); });
  });
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return stand_in::call([&](stand_in::runtime& r) {
    const CUevent_st* a = r.find(start);
    const CUevent_st* b = r.find(end);
    if (!a || !b || !a->recorded || !b->recorded || !a->timing || !b->timing) return cudaErrorInvalidResourceHandle;
    if (a->point.stream->executed < a->point.count || b->point.stream->executed < b->point.count)
      return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(*b->time - *a->time).count();
    return cudaSuccess;
  });
}

// ---- captures and graphs -------------------------------------------------------------------------------------------

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s == r.legacy(s->device)) return cudaErrorStreamCaptureUnsupported;
    if (s->captured_by) return cudaErrorIllegalState;
    auto c = std::make_shared<stand_in::capture>();
    c->mode = mode;
    c->origin = s.get();
    s->captured_by = c;
    s->seen.clear();
    if (mode != cudaStreamCaptureModeRelaxed) stand_in::captures_of_thread.push_back(c);
    return cudaSuccess;
  });
}

inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (graph) *graph = nullptr;
    if (!s || !graph) return cudaErrorInvalidValue;
    const auto c = s->captured_by;
    if (!c) return cudaErrorIllegalState;
    auto& mine = stand_in::captures_of_thread;
    const bool begun_here = std::find(mine.begin(), mine.end(), c) != mine.end();
    if (c->mode != cudaStreamCaptureModeRelaxed && !begun_here) return cudaErrorStreamCaptureWrongThread;
    if (c->origin != s.get()) {
      c->invalid = true;
      return cudaErrorStreamCaptureUnmatched;
    }
    bool joined = true;
    for (const auto& [other, count] : c->issued) {
      const auto seen = s->seen.find(other);
      if (seen == s->seen.end() || seen->second < count) joined = false;
    }
    c->ended = true;
    std::erase(mine, c);
    for (auto& [handle, other] : r.streams) {
      if (other->captured_by == c) other->captured_by = nullptr;
    }
    if (c->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!joined) return cudaErrorStreamCaptureUnjoined;
    auto g = std::make_unique<CUgraph_st>();
    g->operations = c->operations;
    *graph = g.get();
    r.graphs.emplace(g.get(), std::move(g));
    return cudaSuccess;
  });
}

inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto s = r.find(stream);
    if (!s) return cudaErrorInvalidResourceHandle;
    *status = !s->captured_by           ? cudaStreamCaptureStatusNone
              : s->captured_by->invalid ? cudaStreamCaptureStatusInvalidated
                                        : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}

inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, stand_in::capture_mode);
  return cudaSuccess;
}

namespace stand_in {

/// For libraries: if the stream is being recorded, `issue` becomes a node of the graph, and *recorded is true.
inline cudaError_t record_if_capturing(cudaStream_t stream, std::function<bool(cudaStream_t)> issue, bool* recorded) {
  return call([&](runtime& r) {
    const auto s = r.find(stream);
    *recorded = false;
    if (!s) return cudaErrorInvalidResourceHandle;
    if (!s->captured_by) return cudaSuccess;
    *recorded = true;
    return r.record(s, {nullptr, std::move(issue)});
  });
}

}  // namespace stand_in

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long = 0) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto g = r.graphs.find(graph);
    if (g == r.graphs.end()) return cudaErrorInvalidValue;
    auto e = std::make_unique<CUgraphExec_st>();
    e->operations = g->second->operations;
    *executable = e.get();
    r.executables.emplace(e.get(), std::move(e));
    return cudaSuccess;
  });
}
/// Nodes that the host has a part in are called without the lock: they may wait for other threads.
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  std::vector<stand_in::graph_node> nodes;
  const cudaError_t found = stand_in::call([&](stand_in::runtime& r) {
    const auto e = r.executables.find(executable);
    if (!r.find(stream)) return cudaErrorInvalidResourceHandle;
    if (e == r.executables.end()) return cudaErrorInvalidValue;
    nodes = e->second->operations;
    return cudaSuccess;
  });
  if (found != cudaSuccess) return found;
  for (const stand_in::graph_node& node : nodes) {
    const cudaError_t status = stand_in::call([&](stand_in::runtime& r) {
      const auto s = r.find(stream);
      if (!s) return cudaErrorInvalidResourceHandle;
      if (!node.issue) return r.enqueue(s, node.run);
      return s->captured_by ? cudaErrorNotSupported : cudaSuccess;
    });
    if (status != cudaSuccess) return status;
    if (node.issue && !node.issue(stream)) return stand_in::fail(cudaErrorLaunchFailure);
  }
  return cudaSuccess;
}
inline cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  return stand_in::call([&](stand_in::runtime& r) {
    const auto g = r.graphs.find(graph);
    if (g == r.graphs.end()) return cudaErrorInvalidValue;
    if (nodes) return cudaErrorNotSupported;
    *count = g->second->operations.size();
    return cudaSuccess;
  });
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return stand_in::call(
      [&](stand_in::runtime& r) { return r.graphs.erase(graph) ? cudaSuccess : cudaErrorInvalidValue; });
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return stand_in::call(
      [&](stand_in::runtime& r) { return r.executables.erase(executable) ? cudaSuccess : cudaErrorInvalidValue; });
}
