// The measured events of a step, gathered from all ranks, and as a trace. They are recorded elsewhere: by
// parallel/executor.hpp and comm/metrics.hpp. The file format is in trace.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/parallel/executor.hpp"
#include "train_llama/observe/trace.hpp"

namespace plait {

/// Something that a rank did in a step, as bytes that can be sent: an action, a collective, a message, the part of an
/// action that is of one unit, or the norm or an update.
struct step_event {
  enum class kind : std::uint8_t { action, collective, message, part, update };

  kind what = kind::action;
  bool sends = false;          ///< of a message
  plait::action action;        ///< of an action, or a part of one
  step_op op = step_op::pass;  ///< the norm or an update; of a collective what it is for, a gather or a reduction
  std::int16_t stage = -1;     ///< of a unit: whose pass uses it
  std::int32_t unit = -1;      ///< its place among the units of its stage; -1: none
  double begin = 0, end = 0;   ///< seconds since the step's origin, which all ranks share
  std::uint64_t bytes = 0;
  std::uint64_t flow = 0;  ///< of a message: the same number where it is sent and where it is received
  char name[40]{};
  char axis[16]{};

  void call(std::string_view text) { copy(text, name, sizeof name); }
  void along(std::string_view text) { copy(text, axis, sizeof axis); }

 private:
  static void copy(std::string_view text, char* to, std::size_t room) {
    const std::size_t n = std::min(text.size(), room - 1);
    std::copy_n(text.data(), n, to);
    to[n] = '\0';
  }
};
static_assert(std::is_trivially_copyable_v<step_event>);

/// The program of a step, and when its rank did what of it: what `step_watch::times` has been told.
struct timed_program {
  const step_schedule& step;
  int rank;
  const std::vector<timed_entry>& times;
};

/// The events of a step that one rank's executor and recorder have seen. `group` tells apart the pipelines of a mesh,
/// `origin` is the `comm_clock` of a moment that all ranks share, such as the end of a barrier. With the program come
/// parts of actions, the norm and updates (without what they waited), and what started collectives are for.
inline std::vector<step_event> events_of(const pipeline_shape& shape, const std::vector<pipeline_event>& steps,
                                         const recorder& communication, std::uint64_t group, double origin,
                                         const timed_program* program = nullptr) {
  std::vector<step_event> all;
  const auto belongs = [&](step_event& out, const step_entry& e) {
    out.op = e.op;
    if (e.unit < 0) return;
    const std::vector<step_unit>& units = program->step.units;
    out.stage = static_cast<std::int16_t>(units[static_cast<std::size_t>(e.unit)].stage);
    for (int u = e.unit; u >= 0 && units[static_cast<std::size_t>(u)].stage == out.stage; --u) ++out.unit;
  };
  for (const pipeline_event& e : steps) {
    step_event out;
    out.begin = e.begin - origin, out.end = e.end - origin, out.bytes = e.bytes;
    if (e.step.op == step_op::pass) {
      out.action = e.step.pass;
      out.call(describe(e.step.pass));
    } else {
      out.what = step_event::kind::message;
      out.sends = e.step.op == step_op::send;
      out.flow = group * detail::slots(shape) + detail::slot_of(shape, e.step.transfer) + 1;
      out.call(describe(e.step));
      out.along("pp");
    }
    all.push_back(out);
  }
  for (const recorder::event& e : communication.events()) {
    const std::string& label = communication.labels()[static_cast<std::size_t>(e.label)];
    const bool message = e.kind == collective::send || e.kind == collective::receive;
    if (message && label == "pp") continue;  // the executor's own
    step_event out;
    out.what = step_event::kind::collective;
    out.begin = e.start - origin, out.end = std::max(e.start, e.end) - origin, out.bytes = e.bytes;
    out.call(name_of(e.kind));
    out.along(label);
    if (program != nullptr) {
      const std::vector<step_entry>& entries = program->step.programs[static_cast<std::size_t>(program->rank)];
      if (const auto place = static_cast<std::size_t>(e.place);
          e.asynchronous && e.place >= 0 && place < entries.size())
        if (const step_op op = entries[place].op; op == step_op::gather || op == step_op::reduce ||
                                                  op == step_op::reduce_copies || op == step_op::reduce_ties)
          belongs(out, entries[place]);
    }
    all.push_back(out);
  }
  if (program == nullptr) return all;
  for (const timed_entry& e : program->times) {
    const bool pass = e.entry.op == step_op::pass;
    if (!pass && e.entry.op != step_op::norm && e.entry.op != step_op::update) continue;
    step_event out;
    out.what = pass ? step_event::kind::part : step_event::kind::update;
    out.action = e.entry.pass;
    out.begin = e.start - origin + (pass ? 0 : e.waited), out.end = e.end - origin;
    belongs(out, e.entry);
    out.call(describe(e.entry));
    all.push_back(out);
  }
  return all;
}

/// The events of all ranks, on rank 0; nothing on the others. Collective over `ranks`.
template <compute_device Device>
std::vector<std::vector<step_event>> gather_events(Device& device, any_communicator& ranks,
                                                   const std::vector<step_event>& mine) {
  return gather_records(device, ranks, mine, 0);
}

/// For chrome://tracing and ui.perfetto.dev: on each rank what it computes, its collectives and its messages.
inline trace trace_of(const std::vector<std::vector<step_event>>& ranks) {
  trace t;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const int rank = static_cast<int>(r);
    bool used[4] = {};
    for (const step_event& e : ranks[r]) {
      if (e.what == step_event::kind::part) continue;
      const bool arrives = e.what == step_event::kind::message && !e.sends;
      const bool updates = e.what == step_event::kind::update;
      trace_event out{.rank = rank,
                      .track = updates ? 0 : static_cast<int>(e.what) + (arrives ? 1 : 0),
                      .name = e.name,
                      .category = e.what == step_event::kind::action       ? "compute"
                                  : e.what == step_event::kind::collective ? "collective"
                                  : updates                                ? "update"
                                                                           : "p2p",
                      .start_ns = static_cast<std::int64_t>(e.begin * 1e9),
                      .duration_ns = static_cast<std::int64_t>((e.end - e.begin) * 1e9),
                      .bytes = e.bytes,
                      .axis = e.axis};
      if (e.flow != 0) (e.sends ? out.flow_out : out.flow_in) = e.flow;
      used[out.track] = true;
      t.events.push_back(std::move(out));
    }
    const char* const names[] = {"compute", "collectives", "sends", "receives"};
    for (int track = 0; track < 4; ++track)
      if (used[track]) t.tracks.push_back({rank, track, names[track]});
  }
  return t;
}

}  // namespace plait
