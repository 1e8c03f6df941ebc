// Data of streams, events, captures and graphs, and the memory that operations use; stream.hpp runs them. The state of
// the process and its threads: last errors, current devices, captures, and settings of tests.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
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
  std::uint64_t release_threshold = 0, kept = 0, used = 0;
};

namespace stand_in {

inline thread_local cudaError_t last_error = cudaSuccess;
inline thread_local int current_device = 0;
inline thread_local bool device_chosen = false;  ///< whether the thread has called cudaSetDevice
/// By threads that have not called cudaSetDevice. On a GPU each of these calls would make a context on device 0.
inline std::atomic<int> calls_without_device{0};
inline std::atomic<cudaError_t> lost_device{cudaSuccess};  ///< set by tests: the error of queries of events
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
inline thread_local std::vector<std::shared_ptr<capture>> captures_of_thread;

/// Whether this thread may do what only drivers and libraries may: record an event of another device than the stream's.
inline thread_local bool is_library = false;

inline std::atomic<double> abort_seconds{0};  ///< set by tests: the time that an abort of a communicator takes
/// Set by tests: an abort returns only after this number of aborts has started.
inline std::atomic<int> aborts_together{0};
inline std::atomic<int> aborts_begun{0};

inline cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

inline int device_count() {
  static const int count = [] {
    const char* text = std::getenv("PLAIT_STAND_IN_DEVICES");
    return text ? std::atoi(text) : 1;
  }();
  return count;
}

/// Whether another process uses the device in the mode EXCLUSIVE_PROCESS, so that no context can be made on it.
inline bool is_taken(int device) {
  static const char* const text = std::getenv("PLAIT_STAND_IN_TAKEN");
  return text && std::atoi(text) == device;
}

enum class stream_order { late, eager, random };

}  // namespace stand_in
