// The runtime's functions that capture streams and launch graphs.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "stream.hpp"

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
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
    auto g = std::make_unique<CUgraph_st>();
    g->operations = std::move(c->operations);  // events may refer to the capture for a long time
    if (c->invalid) return cudaErrorStreamCaptureInvalidated;
    if (!joined) return cudaErrorStreamCaptureUnjoined;
    *graph = g.get();
    r.graphs.emplace(g.get(), std::move(g));
    return cudaSuccess;
  });
}

inline cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return stand_in::call_on(stream, [&](stand_in::runtime&, const stand_in::stream_ptr& s) {
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

/// For libraries: if the stream is being captured, adds `issue` as a node of the graph and sets *recorded to true.
inline cudaError_t record_if_capturing(cudaStream_t stream, std::function<bool(cudaStream_t)> issue, bool* recorded) {
  *recorded = false;
  return call_on(stream, [&](runtime& r, const stream_ptr& s) {
    if (!s->captured_by) return cudaSuccess;
    *recorded = true;
    return r.record(s, {nullptr, std::move(issue), {}, s.get(), {}, {}});
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
/// Calls nodes with host code without the lock, because they may wait for other threads. The nodes of each captured
/// stream run in the launch's stream, with the clock's times of their own stream.
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  std::vector<stand_in::graph_node> nodes;
  stand_in::replay_times times(0);
  const cudaError_t found = stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
    const auto e = r.executables.find(executable);
    if (e == r.executables.end()) return cudaErrorInvalidValue;
    nodes = e->second->operations;
    times = stand_in::replay_times(std::max(s->at, r.clock.host()));
    return cudaSuccess;
  });
  if (found != cudaSuccess) return found;
  for (const stand_in::graph_node& node : nodes) {
    if (node.moment.what != stand_in::graph_moment::role::none) {
      times.pass(node.stream, node.moment);
      continue;
    }
    const cudaError_t status = stand_in::call_on(stream, [&](stand_in::runtime& r, const stand_in::stream_ptr& s) {
      s->at = times.of(node.stream);
      if (node.issue) return s->captured_by ? cudaErrorNotSupported : cudaSuccess;
      r.will_use_again(node.memory);
      const cudaError_t error = r.enqueue(s, node.run, node.what);
      times.of(node.stream) = s->at;
      return error;
    });
    if (status != cudaSuccess) return status;
    if (!node.issue) continue;
    if (!node.issue(stream)) return stand_in::fail(cudaErrorLaunchFailure);
    times.of(node.stream) = stand_in::time_of(stream);
  }
  stand_in::set_time(stream, times.end());
  return cudaSuccess;
}
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
