// The measured events of a step, gathered from all ranks: as a trace, as a timeline, and the part that waited longest.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/comm/metrics.hpp"
#include "plait/core/text.hpp"
#include "plait/parallel/executor.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/schedule/expand.hpp"
#include "plait/schedule/schedule.hpp"
#include "train_llama/observe/pictures.hpp"
#include "train_llama/observe/timeline.hpp"

namespace plait {

/// An event of a rank in a step, as bytes that can be sent: an action, a collective, a message, the part of an action
/// for one unit, the norm, or an update.
struct step_event {
  enum class kind : std::uint8_t { action, collective, message, part, update };

  kind what = kind::action;
  bool sends = false;          ///< for a message: whether the rank sends it
  plait::action action;        ///< for an action, or a part of one
  step_op op = step_op::pass;  ///< the norm or an update; for a collective its purpose, a gather or a reduction
  std::int16_t stage = -1;     ///< for a unit: the stage whose pass uses it
  std::int32_t unit = -1;      ///< number of the unit in its stage; -1: none
  double begin = 0, end = 0;   ///< seconds since the step's origin, which all ranks share
  std::uint64_t bytes = 0;
  std::uint64_t flow = 0;  ///< for a message: the same number at its sender and its receiver
  fixed_text<40> name{};
  fixed_text<16> axis{};
};
static_assert(std::is_trivially_copyable_v<step_event>);

/// The program of a step, and the times of its entries on one rank, as `step_watch::times` has them.
struct timed_program {
  const step_schedule& step;
  int rank;
  const std::vector<timed_entry>& times;
};

/// Returns the events of a step from one rank's executor and recorder. `group` is the number of the pipeline in the
/// mesh.
/// `origin` is the `comm_clock` at a moment that all ranks share, such as the end of a barrier. With the program there
/// are also parts of actions, the norm and updates (without their waits), and the purposes of collectives.
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
      out.name = describe(e.step.pass);
    } else {
      out.what = step_event::kind::message;
      out.sends = e.step.op == step_op::send;
      out.flow = group * detail::slots(shape) + detail::slot_of(shape, e.step.transfer) + 1;
      out.name = describe(e.step);
      out.axis = "pp";
    }
    all.push_back(out);
  }
  for (const recorder::event& e : communication.events()) {
    const std::string& label = communication.labels()[static_cast<std::size_t>(e.label)];
    const bool message = e.kind == collective::send || e.kind == collective::receive;
    if (message && label == "pp") continue;  // already among the executor's events
    step_event out;
    out.what = step_event::kind::collective;
    out.begin = e.start - origin, out.end = std::max(e.start, e.end) - origin, out.bytes = e.bytes;
    out.name = name_of(e.kind);
    out.axis = label;
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
    out.name = describe(e.entry);
    all.push_back(out);
  }
  return all;
}

/// Returns a trace for chrome://tracing and ui.perfetto.dev: computation, collectives and messages of each rank.
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
                      .name = e.name.str(),
                      .category = e.what == step_event::kind::action       ? "compute"
                                  : e.what == step_event::kind::collective ? "collective"
                                  : updates                                ? "update"
                                                                           : "p2p",
                      .start_ns = static_cast<std::int64_t>(e.begin * 1e9),
                      .duration_ns = static_cast<std::int64_t>((e.end - e.begin) * 1e9),
                      .bytes = e.bytes,
                      .axis = e.axis.str()};
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

/// Returns a measured timeline in milliseconds, to compare with a simulated one. `along[r]` has the events of the
/// pipeline's rank r. With events of a step's program it is the timeline of the whole step. Its units are numbered
/// through all stages.
inline pipeline_timeline timeline_of(const schedule& plan, const std::vector<std::vector<step_event>>& along,
                                     std::string title) {
  pipeline_timeline t{std::move(title), "ms", plan.shape, {}, {}};
  std::vector<int> first(static_cast<std::size_t>(plan.shape.stages()) + 1, 0);  // first unit of each stage
  double length = 0;
  bool whole = false;
  for (const auto& rank : along)
    for (const step_event& e : rank) {
      length = std::max(length, e.end);
      whole = whole || e.what == step_event::kind::part;
      if (e.unit >= 0)
        first[static_cast<std::size_t>(e.stage) + 1] =
            std::max(first[static_cast<std::size_t>(e.stage) + 1], e.unit + 1);
    }
  for (std::size_t s = 1; s < first.size(); ++s) first[s] += first[s - 1];
  const double unseen = 0.001 * 1e3 * length;  // a gap between parts that is too small to draw
  for (const std::vector<step_event>& rank : along) {
    std::vector<timed_action>& passes = t.ranks.emplace_back();
    std::vector<timed_entry> beside;
    for (const step_event& e : rank) {
      const double start = 1e3 * e.begin, end = 1e3 * e.end;
      if (e.what == (whole ? step_event::kind::part : step_event::kind::action))
        detail::add_part(passes, e.action, start, end, whole ? unseen : -1);
      const int unit = e.unit < 0 ? -1 : first[static_cast<std::size_t>(e.stage)] + e.unit;
      const bool moves = e.what == step_event::kind::collective && e.op != step_op::pass;
      if (moves || e.what == step_event::kind::update) beside.push_back({{e.op, unit, {}, {}}, start, end, 0});
    }
    if (whole) t.beside.push_back(std::move(beside));
  }
  return t;
}

/// A step for the simulator: the program of all ranks of a pipeline, and the costs of its parts.
struct costed_step {
  step_schedule step;
  step_costs costs;
};

namespace detail {

/// The times of a step's parts, in milliseconds, from the events of its ranks.
class part_times {
 public:
  part_times(int stages, int data_ranks) : stages_(static_cast<std::size_t>(stages)), data_ranks_(data_ranks) {}

  /// Adds the events of a rank.
  void add(const std::vector<step_event>& events) {
    std::map<std::tuple<step_op, int, int>, std::size_t> seen;
    std::size_t exchanged = 0;
    for (const step_event& e : events) {
      const double time = 1e3 * (e.end - e.begin);
      if (e.op == step_op::norm && e.what == step_event::kind::update) norm_.add(time);
      if (e.what == step_event::kind::collective && e.axis.view() == ends_axis) {
        if (exchanges_.size() == exchanged) exchanges_.push_back(time);
        exchanges_[exchanged] = std::min(exchanges_[exchanged], time);
        ++exchanged;
        continue;
      }
      if (e.unit < 0) continue;
      std::vector<unit>& of = stages_[static_cast<std::size_t>(e.stage)];
      if (of.size() <= static_cast<std::size_t>(e.unit)) of.resize(static_cast<std::size_t>(e.unit) + 1);
      unit& u = of[static_cast<std::size_t>(e.unit)];
      if (e.what == step_event::kind::part) {
        u.passes[static_cast<std::size_t>(e.action.kind)].add(time);
      } else if (e.what == step_event::kind::update) {
        u.update.add(time);
      } else if (e.what == step_event::kind::collective && e.op != step_op::pass) {
        const std::size_t number = seen[{e.op, e.stage, e.unit}]++;
        const auto [at, fresh] = moves_.try_emplace({e.op, e.stage, e.unit, number}, time);
        at->second = std::min(at->second, time);
        hybrid_ = hybrid_ || e.op == step_op::reduce_copies;
        u.bytes = std::max(u.bytes, static_cast<double>(e.bytes) * (e.op == step_op::gather ? data_ranks_ : 1));
      }
    }
  }

  costed_step step(const schedule& plan, data_parallel policy, bool tied) const {
    costed_step out;
    std::vector<step_unit> units;
    for (std::size_t s = 0; s < stages_.size(); ++s)
      for (const unit& u : stages_[s]) {
        step_unit& to = units.emplace_back();
        to.stage = static_cast<int>(s);
        to.parameters = static_cast<std::int64_t>(u.bytes);
        to.trainable = u.update.count > 0;
        out.costs.units.push_back({u.passes[0].value(), u.passes[1].value(), u.passes[2].value(), u.passes[3].value()});
        out.costs.updates.push_back(u.update.value());
      }
    if (tied && units.size() > 1) tie(plan, units, out.costs);
    out.costs.norm = norm_.value();
    out.costs.data_ranks = data_ranks_;
    if ((policy.hybrid = hybrid_)) out.costs.copy_ranks = 2;  // with 2, the reduction's bytes are those of one piece
    out.step = expand(plan, std::move(units), policy);
    price_moves(out);
    return out;
  }

 private:
  struct mean {
    double sum = 0, count = 0;
    void add(double time) { sum += time, ++count; }
    double value() const { return count > 0 ? sum / count : 0; }
  };
  struct unit {
    std::array<mean, 4> passes;
    mean update;
    double bytes = 0;  // of the unit's parameters, as they are communicated
  };

  /// Ties the first and the last unit, which share parameters.
  void tie(const schedule& plan, std::vector<step_unit>& units, step_costs& costs) const {
    step_unit &first = units.front(), &last = units.back();
    if (plan.shape.rank_of(first.stage) == plan.shape.rank_of(last.stage)) {
      last.uses = 0;
      return;
    }
    // Both may have more parameters than the shared ones. The shared ones are taken to be those of the larger unit.
    first.tied_to = static_cast<int>(units.size()) - 1, last.tied_to = 0;
    first.parameters = last.parameters = std::max(first.parameters, last.parameters);
    first.trainable = last.trainable = first.trainable || last.trainable;
    costs.ties.assign(units.size(), 0);
    costs.ties.front() = costs.ties.back() = std::accumulate(exchanges_.begin(), exchanges_.end(), 0.0);
  }

  /// Sets bytes to the measured times: gathers and reductions have a bandwidth of one byte in a millisecond.
  void price_moves(costed_step& out) const {
    out.costs.gather_bytes = out.costs.reduce_bytes = 1;
    double time[2] = {}, bytes[2] = {};
    for (const auto& [which, took] : moves_) time[std::get<0>(which) == step_op::gather ? 0 : 1] += took;
    for (const auto& program : out.step.programs)
      for (const step_entry& e : program)
        if (e.op == step_op::gather || e.op == step_op::reduce || e.op == step_op::reduce_copies)
          bytes[e.op == step_op::gather ? 0 : 1] += wire_bytes(out.step, out.costs, e.op, e.unit);
    out.costs.gather_bytes = bytes[0] > 0 ? time[0] / bytes[0] : 0;
    out.costs.reduce_bytes = bytes[1] > 0 ? time[1] / bytes[1] : 0;
    out.costs.bandwidth = moves_.empty() ? 0 : 1;
  }

  std::vector<std::vector<unit>> stages_;
  int data_ranks_;
  std::map<std::tuple<step_op, int, int, std::size_t>, double> moves_{};  // the least time of each gather and reduction
  std::vector<double> exchanges_{};                                       // the least time of each exchange of ties
  bool hybrid_ = false;
  mean norm_{};
};

}  // namespace detail

/// Returns the step of `plan` under `policy` with the measured times of its parts, in milliseconds. Each unit and kind
/// of pass, the norm and updates have the mean of their times. Gathers and reductions have a time for a byte: for each
/// the least of its ranks, because other ranks may have waited. `peers[r]` has the events of all ranks with the stages
/// of the pipeline's rank r; `data_ranks` of these share parameters. `tied` says that the first and the last unit share
/// parameters, as with a tied embedding. The events must have the parts of all passes.
inline costed_step measured_step(const schedule& plan, const data_parallel& policy,
                                 const std::vector<std::vector<std::vector<step_event>>>& peers, int data_ranks,
                                 bool tied = false) {
  detail::part_times parts(plan.shape.stages(), data_ranks);
  for (const auto& ranks : peers)
    for (const auto& events : ranks) parts.add(events);
  return parts.step(plan, policy, tied);
}

/// A part of a step, over all its microbatches, and the seconds that it waited.
struct step_wait {
  std::string who;   ///< "the update of model.layers.0", "backward passes of head"
  std::string what;  ///< "the reduction of model.layers.0"; empty: calls of the part itself
  double seconds = 0;

  /// Returns "the norm waited 3.1 ms a step for the reduction of model.layers.0".
  std::string text(double steps) const {
    char time[32];
    std::snprintf(time, sizeof time, "%.2g ms a step", 1e3 * seconds / steps);
    return what.empty() ? cat({who, " waited ", time, " in blocking calls"})
                        : cat({who, " waited ", time, " for ", what});
  }
};

namespace detail {

/// Returns the name of an entry without its microbatch.
inline std::string name_in_waits(const step_entry& e, const std::vector<std::string>& units) {
  const std::string unit = e.unit < 0 ? "" : units[static_cast<std::size_t>(e.unit)];
  const auto stages = [&] { return cat({"stage ", e.transfer.from_stage, " to ", e.transfer.to_stage}); };
  constexpr const char* kinds[] = {"forward passes", "backward passes", "input gradients", "weight gradients"};
  if (e.op == step_op::pass) return cat({kinds[static_cast<std::size_t>(e.pass.kind)], " of ", unit});
  if (e.op == step_op::send) return cat({"sends from ", stages()});
  if (e.op == step_op::receive)
    return cat({e.transfer.kind == transfer_kind::activation ? "activations" : "gradients", " from ", stages()});
  if (e.op == step_op::gather) return "the gather of " + unit;
  if (e.op == step_op::release) return "the release of " + unit;
  if (e.op == step_op::reduce) return "the reduction of " + unit;
  if (e.op == step_op::reduce_copies) return "the reduction of the copies of " + unit;
  if (e.op == step_op::reduce_ties) return cat({"the reduction of ", unit, " over tied stages"});
  return e.op == step_op::update ? "the update of " + unit : "the norm";
}

}  // namespace detail

/// Returns the part of a step on rank `rank` that waited longest for communication over `axes`; 0 seconds if none did.
/// `units` are the names of the step's units; only those of this rank are used.
inline step_wait longest_wait(const step_schedule& step, int rank, const wait_times& waits, std::string_view axes,
                              const std::vector<std::string>& units) {
  const std::vector<step_entry>& program = step.programs[static_cast<std::size_t>(rank)];
  const auto name = [&](std::size_t place) {
    return place < program.size() ? detail::name_in_waits(program[place], units) : "the end of the step";
  };
  std::vector<step_wait> parts;
  for (std::size_t place = 0; place < waits.places().size(); ++place)
    for (const wait_times::entry& e : waits.places()[place]) {
      if (e.axes != axes) continue;
      step_wait wait{name(place), {}, e.seconds};
      if (e.started < 0)
        wait.what = "what was started outside of steps";
      else if (e.started != static_cast<int>(place))
        wait.what = name(static_cast<std::size_t>(e.started));
      if (wait.what == wait.who) wait.what.clear();
      std::size_t i = 0;
      while (i < parts.size() && (parts[i].who != wait.who || parts[i].what != wait.what)) ++i;
      if (i == parts.size())
        parts.push_back(wait);
      else
        parts[i].seconds += wait.seconds;
    }
  step_wait longest;
  for (const step_wait& w : parts)
    if (w.seconds > longest.seconds) longest = w;
  return longest;
}

}  // namespace plait
