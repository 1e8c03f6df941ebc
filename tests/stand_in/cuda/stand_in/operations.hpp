// The things that streams, events, captures and graphs hold, and the memory that operations use. It runs nothing:
// stream.hpp does.
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

/// Memory that an operation reads or writes, as far as its arguments show: an allocation on the device, or an address
/// in pinned memory (number 0).
struct use {
  const char* at;
  std::uint64_t number;
};
struct uses {
  std::string_view who;
  std::vector<use> of;
};

/// How far every stream of a capture had come.
using capture_clock = std::map<const CUstream_st*, std::uint64_t>;

/// What a graph does at one place: it puts `run` into the stream, or, where the host has a part in it, calls `issue`
/// with the stream at every launch. Libraries record themselves so; a launch fails where `issue` does.
struct graph_node {
  std::function<void()> run;
  std::function<bool(cudaStream_t)> issue;
  task what;
  const CUstream_st* stream = nullptr;  ///< that was recorded
  graph_moment moment;
  uses memory = {};
};

struct capture {
  cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
  CUstream_st* origin = nullptr;
  bool invalid = false, ended = false;
  std::vector<graph_node> operations;                  // in the order of the calls, which respects every dependency
  std::map<const CUstream_st*, std::uint64_t> issued;  // operations of each stream
  std::size_t events = 0;                              // that were recorded, while the clock is on
};

struct dependency {
  stream_ptr stream;
  std::uint64_t count = 0;
};

/// Work that streams of several host threads do together, as a collective's kernels do: it is done once, when every
/// part has been put into a stream and all of these streams have come to theirs. A stream that gets there earlier
/// waits, and the host goes on.
struct meeting {
  std::size_t missing = 0;         ///< parts that are in no stream yet
  std::vector<dependency> before;  ///< of each part that is: what its stream does first
  std::function<void()> run;
  std::function<bool()> given_up;                  ///< whether the parts that miss will never come: nobody waits then
  std::function<void(const std::string&)> refuse;  ///< told of streams that wait for each other
  bool done = false;
};

struct operation {
  std::function<void()> run;
  std::vector<dependency> after;
  std::vector<std::shared_ptr<meeting>> meetings;
  uses memory;

  /// Whether it will still touch its memory: a meeting that was held, or that an abort has ended, does not.
  bool touches() const {
    return meetings.empty() ||
           std::any_of(meetings.begin(), meetings.end(), [](const auto& m) { return !m->done && !m->given_up(); });
  }
};
using event_time = std::chrono::steady_clock::time_point;

}  // namespace stand_in

struct CUstream_st {
  int device = 0, priority = 0, polls = 0;
  bool blocking = true;  // waits for the legacy stream, and is waited for
  bool destroyed = false;
  std::uint64_t enqueued = 0, executed = 0;
  std::deque<stand_in::operation> queue;
  bool under_way = false;  // the first of them waits for other streams
  std::shared_ptr<stand_in::capture> captured_by;
  stand_in::capture_clock seen;  // while captured
  double at = 0;                 // the clock's time, at the end of what is enqueued
};

struct CUevent_st {
  int device = 0, polls = 0;
  bool recorded = false, timing = true;
  stand_in::dependency point;
  std::shared_ptr<stand_in::event_time> time;
  std::shared_ptr<stand_in::capture> captured_by;
  stand_in::capture_clock seen;
  double at = 0;             // the clock's time
  std::size_t captured = 0;  // its number in the capture
};

struct CUgraph_st {
  std::vector<stand_in::graph_node> operations;
};
struct CUgraphExec_st {
  std::vector<stand_in::graph_node> operations;
};
struct CUmemPoolHandle_st {
  int device = 0;
  bool destroyed = false;  // goes when its last allocation does
  std::set<int> peers;     // other devices that may use its memory
  std::uint64_t release_threshold = 0, kept = 0, used = 0, used_high = 0, follow = 1, opportunistic = 1, internal = 1;
};
