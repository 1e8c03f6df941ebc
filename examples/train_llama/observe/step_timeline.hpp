// The timeline of a step from the events of its ranks, and the same step simulated from what its parts took. The events
// come from step_trace.hpp; drawings are made by pipeline_svg.hpp. Tested in
// tests/unit/examples/observe/step_timeline.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "plait/parallel/pipeline.hpp"
#include "plait/schedule/expand.hpp"
#include "plait/schedule/timeline.hpp"
#include "train_llama/observe/step_trace.hpp"

namespace plait {

/// The measured counterpart of a simulated timeline, in milliseconds: `along[r]` are the events of the pipeline's rank
/// r. With those of a step's program it is of the whole step, whose units are numbered through all stages.
inline pipeline_timeline timeline_of(const schedule& plan, const std::vector<std::vector<step_event>>& along,
                                     std::string title) {
  pipeline_timeline t{std::move(title), "ms", plan.shape, {}, {}};
  std::vector<int> first(static_cast<std::size_t>(plan.shape.stages()) + 1, 0);  // unit of each stage
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
  const double unseen = 0.001 * 1e3 * length;  // a gap between parts that no drawing would show
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

/// A step to simulate: the program of all ranks of a pipeline and the costs of its parts.
struct costed_step {
  step_schedule step;
  step_costs costs;
};

/// Returns the step of `plan` under `policy` with what its parts took, in milliseconds: of each unit and kind of pass
/// the mean; of the norm and updates likewise; and of gathers and reductions the time for a byte, of each the least of
/// the ranks that took part, as others may have waited for it. `peers[r]` are the events of all ranks that hold the
/// stages of the pipeline's rank r, `data_ranks` of which share parameters; where the first and the last unit share
/// some, as a tied embedding, they are `tied`. There must be the parts of all passes.
inline costed_step measured_step(const schedule& plan, const data_parallel& policy,
                                 const std::vector<std::vector<std::vector<step_event>>>& peers, int data_ranks,
                                 bool tied = false) {
  struct mean {
    double sum = 0, count = 0;
    double value() const { return count > 0 ? sum / count : 0; }
  };
  struct part_times {
    std::array<mean, 4> passes;
    mean update;
    double bytes = 0;  // of its parameters, as they are communicated
    bool reduced = false;
  };
  std::vector<std::vector<part_times>> stages(static_cast<std::size_t>(plan.shape.stages()));
  std::map<std::tuple<step_op, int, int, std::size_t>, double> moves;  // the least time of each, by which one it is
  std::vector<double> exchanges;                                       // of ties, likewise
  bool hybrid = false;
  mean norm;
  for (const auto& ranks : peers)
    for (const auto& events : ranks) {
      std::map<std::tuple<step_op, int, int>, std::size_t> seen;
      std::size_t exchanged = 0;
      for (const step_event& e : events) {
        if (e.op == step_op::norm && e.what == step_event::kind::update) norm.sum += e.end - e.begin, ++norm.count;
        if (e.what == step_event::kind::collective && std::string_view(e.axis) == detail::ends_axis) {
          const double time = 1e3 * (e.end - e.begin);
          if (exchanges.size() == exchanged) exchanges.push_back(time);
          exchanges[exchanged] = std::min(exchanges[exchanged], time);
          ++exchanged;
          continue;
        }
        if (e.unit < 0) continue;
        std::vector<part_times>& of = stages[static_cast<std::size_t>(e.stage)];
        if (of.size() <= static_cast<std::size_t>(e.unit)) of.resize(static_cast<std::size_t>(e.unit) + 1);
        part_times& u = of[static_cast<std::size_t>(e.unit)];
        const double time = 1e3 * (e.end - e.begin);
        if (e.what == step_event::kind::part) {
          mean& m = u.passes[static_cast<std::size_t>(e.action.kind)];
          m.sum += time, ++m.count;
        } else if (e.what == step_event::kind::update) {
          u.update.sum += time, ++u.update.count;
          u.reduced = true;
        } else if (e.what == step_event::kind::collective && e.op != step_op::pass) {
          const std::size_t number = seen[{e.op, e.stage, e.unit}]++;
          const auto [at, fresh] = moves.try_emplace({e.op, e.stage, e.unit, number}, time);
          at->second = std::min(at->second, time);
          hybrid = hybrid || e.op == step_op::reduce_copies;
          u.bytes = std::max(u.bytes, static_cast<double>(e.bytes) * (e.op == step_op::gather ? data_ranks : 1));
        }
      }
    }
  costed_step out;
  std::vector<step_unit> units;
  for (std::size_t s = 0; s < stages.size(); ++s)
    for (const part_times& u : stages[s]) {
      step_unit& unit = units.emplace_back();
      unit.stage = static_cast<int>(s);
      unit.parameters = static_cast<std::int64_t>(u.bytes);
      unit.trainable = u.reduced;
      out.costs.units.push_back({u.passes[0].value(), u.passes[1].value(), u.passes[2].value(), u.passes[3].value()});
      out.costs.updates.push_back(u.update.value());
    }
  if (tied && units.size() > 1) {
    step_unit &first = units.front(), &last = units.back();
    const int number = static_cast<int>(units.size()) - 1;
    if (plan.shape.rank_of(first.stage) == plan.shape.rank_of(last.stage)) {
      last.uses = 0;
    } else {  // either may have more than what they share, which is taken to be all of the larger one
      first.tied_to = number, last.tied_to = 0;
      first.parameters = last.parameters = std::max(first.parameters, last.parameters);
      first.trainable = last.trainable = first.trainable || last.trainable;
      out.costs.ties.assign(units.size(), 0);
      out.costs.ties.front() = out.costs.ties.back() = std::accumulate(exchanges.begin(), exchanges.end(), 0.0);
    }
  }
  out.costs.norm = 1e3 * norm.value();
  out.costs.data_ranks = data_ranks;
  data_parallel how = policy;
  if ((how.hybrid = hybrid)) out.costs.copy_ranks = 2;  // the bytes of a piece, of which the time is taken
  out.step = expand(plan, std::move(units), how);
  // Bytes are given the time that they took: gathers and reductions have one bandwidth, of a byte in a millisecond.
  out.costs.gather_bytes = out.costs.reduce_bytes = 1;
  double time[2] = {}, bytes[2] = {};
  for (const auto& [which, took] : moves) time[std::get<0>(which) == step_op::gather ? 0 : 1] += took;
  for (const auto& program : out.step.programs)
    for (const step_entry& e : program)
      if (e.op == step_op::gather || e.op == step_op::reduce || e.op == step_op::reduce_copies)
        bytes[e.op == step_op::gather ? 0 : 1] += wire_bytes(out.step, out.costs, e.op, e.unit);
  out.costs.gather_bytes = bytes[0] > 0 ? time[0] / bytes[0] : 0;
  out.costs.reduce_bytes = bytes[1] > 0 ? time[1] / bytes[1] : 0;
  out.costs.bandwidth = moves.empty() ? 0 : 1;
  return out;
}

}  // namespace plait
