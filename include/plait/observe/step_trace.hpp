// The measured events of a step, gathered from all ranks, as a trace, a timeline or costs to simulate with. They are
// recorded elsewhere: by pipeline/executor.hpp and comm/recorder.hpp. The file format is in observe/trace.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/observe/trace.hpp"
#include "plait/pipeline/executor.hpp"
#include "plait/tensor/gather_records.hpp"

namespace plait {

/// Something that a rank did in a step, as bytes that can be sent: an action, a collective or a message.
struct step_event {
  enum class kind : std::uint8_t { action, collective, message };

  kind what = kind::action;
  bool sends = false;         ///< of a message
  plait::action action;       ///< of an action
  double begin = 0, end = 0;  ///< seconds since the step's origin, which all ranks share
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

/// The events of a step that one rank's executor and recorder have seen. `group` tells apart the pipelines of a mesh,
/// `origin` is the `comm_clock` of a moment that all ranks share, such as the end of a barrier.
inline std::vector<step_event> events_of(const pipeline_shape& shape, const std::vector<pipeline_event>& steps,
                                         const recorder& communication, std::uint64_t group, double origin) {
  std::vector<step_event> all;
  for (const pipeline_event& e : steps) {
    step_event out;
    out.begin = e.begin - origin, out.end = e.end - origin, out.bytes = e.bytes;
    if (e.step.kind == step_kind::compute) {
      out.action = e.step.action;
      out.call(describe(e.step.action));
    } else {
      out.what = step_event::kind::message;
      out.sends = e.step.kind == step_kind::send;
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
      const bool arrives = e.what == step_event::kind::message && !e.sends;
      trace_event out{.rank = rank,
                      .track = static_cast<int>(e.what) + (arrives ? 1 : 0),
                      .name = e.name,
                      .category = e.what == step_event::kind::action       ? "compute"
                                  : e.what == step_event::kind::collective ? "collective"
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

/// The costs of the actions of a measured timeline: of each stage and kind the mean.
inline schedule_costs measured_costs(const pipeline_timeline& t) {
  constexpr std::size_t kinds = 4;
  const auto stages = static_cast<std::size_t>(t.shape.stages());
  std::vector<double> sum(stages * kinds, 0), count(stages * kinds, 0);
  for (std::size_t r = 0; r < t.ranks.size(); ++r)
    for (const timed_action& a : t.ranks[r]) {
      const auto stage = static_cast<std::size_t>(t.shape.stage_of(static_cast<int>(r), a.action.chunk));
      const std::size_t at = stage * kinds + static_cast<std::size_t>(a.action.kind);
      sum[at] += a.end - a.start, count[at] += 1;
    }
  schedule_costs costs;
  for (std::size_t s = 0; s < stages; ++s) {
    const auto mean = [&](action_kind kind) {
      const std::size_t at = s * kinds + static_cast<std::size_t>(kind);
      return count[at] > 0 ? sum[at] / count[at] : 0;
    };
    costs.stages.push_back({mean(action_kind::forward), mean(action_kind::backward), mean(action_kind::input_backward),
                            mean(action_kind::weight_backward)});
  }
  return costs;
}

/// The measured counterpart of a simulated timeline, in milliseconds: `along[r]` are the events of the pipeline's rank
/// r.
inline pipeline_timeline timeline_of(const schedule& plan, const std::vector<std::vector<step_event>>& along,
                                     std::string title) {
  pipeline_timeline t{std::move(title), "ms", plan.shape, {}};
  for (const std::vector<step_event>& rank : along) {
    t.ranks.emplace_back();
    for (const step_event& e : rank)
      if (e.what == step_event::kind::action)
        t.ranks.back().push_back({e.action, 1e3 * e.begin, 1e3 * e.end, static_cast<int>(t.ranks.back().size())});
  }
  return t;
}

}  // namespace plait
