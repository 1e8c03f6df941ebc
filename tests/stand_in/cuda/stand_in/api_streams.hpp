// The runtime's functions on streams and events. Captures and graphs are in api_graphs.hpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

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

/// Returns at once, as in CUDA: queued operations run later.
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (s->captured_by) s->captured_by->invalid = true;
    s->destroyed = true;
    if (s->executed == s->enqueued) r.streams.erase(stream);
    return cudaSuccess;
  });
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    if (const auto error = r.refuse_while_capturing(s.get())) return error;
    r.await(s);
    return cudaSuccess;
  });
}

/// Waits for the streams of all threads that share the device. With the clock on, this thread's time is then theirs.
inline cudaError_t cudaDeviceSynchronize() {
  return stand_in::call([&](stand_in::runtime& r) {
    if (const auto error = r.refuse_while_capturing(nullptr)) return error;
    r.settle_all(stand_in::current_device);
    for (const auto& [handle, s] : r.streams) {
      if (r.clock.on() && s->device == stand_in::current_device) r.clock.host_waits(s->at);
    }
    stand_in::arena::instance().open();
    stand_in::arena::instance().check_guards();
    stand_in::arena::instance().close();
    return cudaSuccess;
  });
}

namespace stand_in {

/// Not ready for the first polls in any case; then finishes the work, so loops that poll end.
template <class Finish>
cudaError_t poll(int& polls, bool done, Finish finish) {
  if (done) return cudaSuccess;
  if (++polls <= 3 || !finish()) return cudaErrorNotReady;
  polls = 0;
  return cudaSuccess;
}

}  // namespace stand_in

inline cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    if (const auto error = r.refuse_while_capturing(s.get())) return error;
    if (r.clock.on()) return r.clock.passed(s->at) ? r.finish(s), cudaSuccess : cudaErrorNotReady;
    return stand_in::poll(s->polls, s->executed == s->enqueued, [&] { return r.finish(s); });
  });
}

inline cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return stand_in::call_on(stream, [&](stand_in::runtime&, const stand_in::stream_ptr& s) {
    *priority = s->priority;
    return cudaSuccess;
  });
}

inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    return r.enqueue(s, [function, data] {
      stand_in::arena::instance().close();  // host functions must not touch device memory
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
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    CUevent_st* e = r.find(event);
    if (!e || (e->device != s->device && !stand_in::is_library)) return cudaErrorInvalidResourceHandle;
    e->polls = 0;
    if (s->captured_by) {
      if (s->captured_by->invalid) return cudaErrorStreamCaptureInvalidated;
      e->captured_by = s->captured_by;
      e->seen = s->seen;
      if (r.clock.on()) r.note(s, {stand_in::graph_moment::role::record, e->captured = s->captured_by->events++});
      return cudaSuccess;
    }
    auto time = std::make_shared<stand_in::event_time>();
    if (const auto error = r.enqueue(s, [time] { *time = std::chrono::steady_clock::now(); })) return error;
    e->captured_by = nullptr;
    e->recorded = true;
    e->point = {s, s->enqueued};
    e->at = s->at;
    e->time = std::move(time);
    return cudaSuccess;
  });
}

inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned = 0) {
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    const CUevent_st* e = r.find(event);
    if (!e) return cudaErrorInvalidResourceHandle;
    if (e->captured_by) {
      if (e->captured_by->ended || e->captured_by->invalid) return cudaErrorCapturedEvent;
      if (s->captured_by && s->captured_by != e->captured_by) {
        s->captured_by->invalid = e->captured_by->invalid = true;
        return cudaErrorStreamCaptureMerge;
      }
      if (!s->captured_by) {
        s->captured_by = e->captured_by;
        s->seen.clear();
        s->captured_by->issued[s.get()] = s->captured_by->issued[s.get()];  // it must join, even without operations
        s->seen[s.get()] = ++s->captured_by->issued[s.get()];
      }
      for (const auto& [other, count] : e->seen) s->seen[other] = std::max(s->seen[other], count);
      if (r.clock.on()) r.note(s, {stand_in::graph_moment::role::wait, e->captured});
      return cudaSuccess;
    }
    if (s->captured_by) {
      if (!e->recorded) return cudaSuccess;
      s->captured_by->invalid = true;
      return cudaErrorStreamCaptureIsolation;
    }
    if (!e->recorded) return cudaSuccess;
    s->at = std::max(s->at, e->at);
    return r.enqueue(s, [] {}, {}, {e->point});
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
    if (e->recorded) r.settle(e->point.stream, e->point.count);
    if (e->recorded && r.clock.on()) r.clock.host_waits(e->at);
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
    const auto finish = [&] { return r.advance(e->point.stream, e->point.count); };
    if (!r.clock.on() || !e->recorded) return stand_in::poll(e->polls, done, finish);
    return r.clock.passed(e->at) ? finish(), cudaSuccess : cudaErrorNotReady;
  });
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  return stand_in::call([&](stand_in::runtime& r) {
    const CUevent_st* a = r.find(start);
    const CUevent_st* b = r.find(end);
    if (!a || !b || !a->recorded || !b->recorded || !a->timing || !b->timing) return cudaErrorInvalidResourceHandle;
    if (a->point.stream->executed < a->point.count || b->point.stream->executed < b->point.count)
      return cudaErrorNotReady;
    if (r.clock.on()) return *milliseconds = static_cast<float>(b->at - a->at), cudaSuccess;
    *milliseconds = std::chrono::duration<float, std::milli>(*b->time - *a->time).count();
    return cudaSuccess;
  });
}
