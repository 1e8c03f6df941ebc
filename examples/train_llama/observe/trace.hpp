// Writes events of ranks as a trace for chrome://tracing and ui.perfetto.dev. The events are those of
// step_events.hpp or of a simulated timeline (timeline.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/io/atomic_file.hpp"
#include "plait/io/json.hpp"
#include "plait/schedule/verify.hpp"
#include "train_llama/observe/timeline.hpp"

namespace plait {

/// Something that a rank did, from when to when: a compute, a collective, a message, a save.
struct trace_event {
  int rank = 0;
  int track = 0;              ///< of the rank's own, for instance 0 for what it computes and 1 for what it sends
  std::string name{};         ///< "F3.1", "all_reduce"
  std::string category{};     ///< "compute", "collective", "p2p"; viewers filter by it
  std::int64_t start_ns = 0;  ///< of one clock for all ranks
  std::int64_t duration_ns = 0;
  std::uint64_t bytes = 0;     ///< moved; 0: none, and not shown
  std::string axis{};          ///< mesh axis of a communication; empty: not shown
  std::uint64_t flow_out = 0;  ///< an arrow begins where this event ends, and leads to the event whose `flow_in` is
  std::uint64_t flow_in = 0;   ///< the same number; 0: none. A number is used by one pair of events.
};

/// The name of a track; tracks without a name are called by their number.
struct trace_track {
  int rank = 0;
  int track = 0;
  std::string name;
};

/// Events of any ranks in any order, as each rank collects them.
struct trace {
  std::vector<trace_event> events;
  std::vector<trace_track> tracks;
};

namespace detail {

/// Microseconds with exactly three decimals: the format's unit, without rounding.
inline std::string microseconds(std::int64_t ns) {
  const std::uint64_t size = ns < 0 ? 0 - static_cast<std::uint64_t>(ns) : static_cast<std::uint64_t>(ns);
  char text[40];
  std::snprintf(text, sizeof text, "%s%llu.%03llu", ns < 0 ? "-" : "", static_cast<unsigned long long>(size / 1000),
                static_cast<unsigned long long>(size % 1000));
  return text;
}

inline std::string trace_place(int rank, int track) { return cat({"\"pid\":", rank, ",\"tid\":", track}); }

}  // namespace detail

/// The trace in the JSON format of chrome://tracing and ui.perfetto.dev: a process for each rank, a thread for each of
/// its tracks, a complete event for each event, and arrows. Times count from the earliest start.
inline std::string to_chrome_trace(const trace& t) {
  std::int64_t origin = 0;
  if (!t.events.empty())
    origin = std::min_element(t.events.begin(), t.events.end(), [](const auto& a, const auto& b) {
               return a.start_ns < b.start_ns;
             })->start_ns;
  std::string out = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  bool first = true;
  const auto line = [&](const std::string& members) {
    out += first ? "\n{" : ",\n{";
    first = false;
    out += members + "}";
  };
  std::vector<int> ranks;
  for (const trace_event& e : t.events) ranks.push_back(e.rank);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  for (int rank : ranks) {
    line(cat({"\"ph\":\"M\",\"name\":\"process_name\",", detail::trace_place(rank, 0), ",\"args\":{\"name\":\"rank ",
              rank, "\"}"}));
    line(cat({"\"ph\":\"M\",\"name\":\"process_sort_index\",", detail::trace_place(rank, 0),
              ",\"args\":{\"sort_index\":", rank, "}"}));
  }
  for (const trace_track& track : t.tracks) {
    line(cat({"\"ph\":\"M\",\"name\":\"thread_name\",", detail::trace_place(track.rank, track.track),
              ",\"args\":{\"name\":", json_string(track.name), "}"}));
    line(cat({"\"ph\":\"M\",\"name\":\"thread_sort_index\",", detail::trace_place(track.rank, track.track),
              ",\"args\":{\"sort_index\":", track.track, "}"}));
  }
  for (const trace_event& e : t.events) {
    const std::string place = detail::trace_place(e.rank, e.track);
    std::string args;
    if (e.bytes > 0) append(args, {"\"bytes\":", e.bytes});
    if (!e.axis.empty()) args += (args.empty() ? "\"axis\":" : ",\"axis\":") + json_string(e.axis);
    line(cat({"\"ph\":\"X\",\"name\":", json_string(e.name), ",\"cat\":", json_string(e.category), ",", place,
              ",\"ts\":", detail::microseconds(e.start_ns - origin), ",\"dur\":", detail::microseconds(e.duration_ns),
              ",\"args\":{", args, "}"}));
    // An arrow's ends must lie within their events, so the first is just before the end.
    const std::int64_t last = e.start_ns - origin + std::max<std::int64_t>(0, e.duration_ns - 1);
    if (e.flow_out != 0)
      line(cat({"\"ph\":\"s\",\"name\":\"p2p\",\"cat\":\"flow\",", place, ",\"ts\":", detail::microseconds(last),
                ",\"id\":", e.flow_out}));
    if (e.flow_in != 0)
      line(cat({"\"ph\":\"f\",\"bp\":\"e\",\"name\":\"p2p\",\"cat\":\"flow\",", place,
                ",\"ts\":", detail::microseconds(e.start_ns - origin), ",\"id\":", e.flow_in}));
  }
  return out + "\n]}\n";
}

/// Writes the trace in one step; `error` naming `flag` when it cannot.
inline void write_chrome_trace(const trace& t, const std::string& path, const std::string& flag = "trace") {
  write_file_atomically(path, to_chrome_trace(t), flag);
}

/// A pipeline's timeline as events, with an arrow from the action that makes a message to the one that needs it.
/// `ns_per_unit` is the length of the timeline's unit.
inline trace trace_of(const pipeline_timeline& timeline, double ns_per_unit) {
  trace t;
  const auto number_of = [&](const transfer& message) { return 1 + detail::slot_of(timeline.shape, message); };
  const double begin = timeline.begin();
  const auto ns = [&](double time) { return static_cast<std::int64_t>((time - begin) * ns_per_unit + 0.5); };
  for (std::size_t r = 0; r < timeline.ranks.size(); ++r) {
    const int rank = static_cast<int>(r);
    t.tracks.push_back({rank, 0, "pipeline"});
    for (const timed_action& a : timeline.ranks[r]) {
      trace_event e{.rank = rank,
                    .name = describe(a.action),
                    .category = a.action.kind == action_kind::forward ? "forward" : "backward",
                    .start_ns = ns(a.start),
                    .duration_ns = ns(a.end) - ns(a.start)};
      transfer message;
      if (detail::output_of(timeline.shape, rank, a.action, message)) e.flow_out = number_of(message);
      if (detail::input_of(timeline.shape, rank, a.action, message)) e.flow_in = number_of(message);
      t.events.push_back(std::move(e));
    }
  }
  return t;
}

}  // namespace plait
