// Data of streams, events, captures and graphs, and the memory that operations use. stream.hpp runs them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "api_types.hpp"
#include "clock.hpp"

namespace stand_in {

using stream_ptr = std::shared_ptr<CUstream_st>;

/// Memory that an operation reads or writes, found from its arguments: an allocation on the device, or an address in
/// pinned memory (number 0).
struct use {
  const char* at;
  std::uint64_t number;
};
struct uses {
  std::string_view who;
  std::vector<use> of;
};

/// The number of operations of each stream of a capture at some point.
using capture_clock = std::map<const CUstream_st*, std::uint64_t>;

/// An operation of a graph. A launch puts `run` into the stream or, for operations with host code, calls `issue` with
/// the stream. Libraries add such nodes; a launch fails if `issue` does.
struct graph_node {
  std::function<void()> run;
  std::function<bool(cudaStream_t)> issue;
  task what;
  const CUstream_st* stream = nullptr;  ///< the captured stream
  graph_moment moment;
  uses memory = {};
};

struct capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
  CUstream_st* origin = nullptr;
  bool invalid = false, ended = false;
  std::vector<graph_node> operations;                  // in the order of the calls, which respects every dependency
  std::map<const CUstream_st*, std::uint64_t> issued;  // operations of each stream
  std::size_t events = 0;                              // number of recorded events, with the clock on
};

struct dependency {
  stream_ptr stream;
  std::uint64_t count = 0;
};

/// Work that streams of several host threads do together, such as a collective's kernels. It runs once, when every part
/// is in a stream and all of these streams have reached their parts. A stream that arrives earlier waits; the host does
/// not.
struct meeting {
  std::size_t missing = 0;         ///< parts that are not in a stream yet
  std::vector<dependency> before;  ///< of each part in a stream: the earlier operations of that stream
  std::function<void()> run;
  std::function<bool()> given_up;  ///< whether the missing parts will never come; streams then do not wait
  std::function<void(const std::string&)> refuse;  ///< called with a text when streams wait for each other
  bool done = false;
};

struct operation {
  std::function<void()> run;
  std::vector<dependency> after;
  std::vector<std::shared_ptr<meeting>> meetings;
  uses memory;

  /// Whether it still uses its memory: no, after its meeting has run or an abort has ended it.
  bool touches() const {
    return meetings.empty() ||
           std::any_of(meetings.begin(), meetings.end(), [](const auto& m) { return !m->done && !m->given_up(); });
  }
};
using event_time = std::chrono::steady_clock::time_point;

}  // namespace stand_in

struct CUstream_st {
  int device = 0, priority = 0, polls = 0;
  bool blocking = true;  // ordered with the legacy stream, in both directions
  bool destroyed = false;
  std::uint64_t enqueued = 0, executed = 0;
  std::deque<stand_in::operation> queue;
  bool in_flight = false;  // its first operation waits for other streams
  std::shared_ptr<stand_in::capture> captured_by;
  stand_in::capture_clock seen;  // during a capture
  double at = 0;                 // the clock's time, at the end of the queued operations
};

struct CUevent_st {
  int device = 0, polls = 0;
  bool recorded = false, timing = true;
  stand_in::dependency point;
  std::shared_ptr<stand_in::event_time> time;
  std::shared_ptr<stand_in::capture> captured_by;
  stand_in::capture_clock seen;
  double at = 0;             // the clock's time
  std::size_t captured = 0;  // its index in the capture
};

struct CUgraph_st {
  std::vector<stand_in::graph_node> operations;
};
struct CUgraphExec_st {
  std::vector<stand_in::graph_node> operations;
};
struct CUmemPoolHandle_st {
  int device = 0;
  bool destroyed = false;  // is deleted with its last allocation
  std::set<int> peers;     // other devices with access to its memory
  std::uint64_t release_threshold = 0, kept = 0, used = 0, used_high = 0, follow = 1, opportunistic = 1, internal = 1;
};
