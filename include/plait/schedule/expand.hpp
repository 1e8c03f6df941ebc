// Expands a pipeline's schedule to each rank's program with sends and receives. With a policy of data parallelism it
// also adds gathers, releases, reductions and updates.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/schedule/simulate.hpp"

namespace plait {

/// Returns each rank's computations, sends and receives in an order that every backend can follow.
///
/// A rank's messages are those of the global transfer list (`simulation::transfers`) that concern it, merged with its
/// actions. A send follows the action that makes its data. A receive precedes the first action that ends after the
/// message was sent, and so also the action that needs it. All programs are sorted by one order of events (simulated
/// time, then `sequence`). So no deadlock is possible, even if every entry blocks and each rank has a single queue.
///
/// An executor runs the entries in order:
///
///     for (const step_entry& e : programs[rank]) switch (e.op) {
///       case step_op::receive: post(e.transfer); break;              // returns at once
///       case step_op::pass:    wait_for_input(e.pass); compute(e.pass); break;
///       default:               post(e.transfer);                     // a send: returns at once
///     }
///
/// Posting should not block: a receive may come several actions before its message is sent, so that the message arrives
/// in time. Throws like `simulate`.
constexpr std::vector<std::vector<step_entry>> rank_program(const schedule& s, const simulation& times) {
  const pipeline_shape& shape = s.shape;
  std::vector<std::vector<step_entry>> programs(static_cast<std::size_t>(shape.ranks));
  std::vector<std::size_t> next(programs.size(), 0);
  for (std::size_t r = 0; r < programs.size(); ++r) programs[r].reserve(times.ranks[r].size() * 3);

  // Adds the actions that precede a transfer in the order of events.
  const auto advance = [&](std::size_t rank, const timed_transfer* until) {
    const timed_action* const mine = times.ranks[rank].data();
    const std::size_t size = times.ranks[rank].size();
    for (std::size_t& i = next[rank]; i < size; ++i) {
      const timed_action& a = mine[i];
      if (until && (a.end != until->sent ? a.end > until->sent : a.sequence > until->sequence)) break;
      programs[rank].push_back({step_op::pass, -1, a.action});
    }
  };
  for (const timed_transfer& t : times.transfers) {
    const auto from = static_cast<std::size_t>(shape.rank_of(t.transfer.from_stage));
    const auto to = static_cast<std::size_t>(shape.rank_of(t.transfer.to_stage));
    advance(from, &t);
    programs[from].push_back({step_op::send, -1, {}, t.transfer});
    advance(to, &t);
    programs[to].push_back({step_op::receive, -1, {}, t.transfer});
  }
  for (std::size_t r = 0; r < programs.size(); ++r) advance(r, nullptr);
  return programs;
}

constexpr std::vector<std::vector<step_entry>> rank_program(const schedule& s, const schedule_costs& costs = {}) {
  return rank_program(s, simulate(s, costs));
}

namespace detail {

/// Throws `error` for illegal units or policies, with the field and its legal values.
constexpr void check_units(const pipeline_shape& shape, const std::vector<step_unit>& units,
                           const data_parallel& policy) {
  const int stages = shape.stages(), count = static_cast<int>(units.size());
  int stage = 0;
  for (int u = 0; u < count; ++u) {
    const step_unit& unit = units[static_cast<std::size_t>(u)];
    if (unit.stage < stage || unit.stage >= stages)
      fail({"step: unit ", u, " is of stage ", unit.stage, "; units stand in the order of stages 0 to ", stages - 1});
    stage = unit.stage;
    if (unit.parameters < 0) fail({"step: unit ", u, " has ", unit.parameters, " parameters; legal is 0 or more"});
    if (unit.uses != -1) {
      const bool other = unit.uses >= 0 && unit.uses < count && unit.uses != u;
      if (!other || shape.rank_of(units[static_cast<std::size_t>(unit.uses)].stage) != shape.rank_of(unit.stage))
        fail({"step: unit ", u, " uses ", unit.uses, ", which must be another unit of the same rank"});
    }
    if (unit.tied_to == -1) continue;
    const bool there = unit.tied_to >= 0 && unit.tied_to < count && unit.tied_to != u;
    if (!there || units[static_cast<std::size_t>(unit.tied_to)].tied_to != u)
      fail({"step: unit ", u, " is tied to ", unit.tied_to, ", which must be another unit that is tied to it"});
    const step_unit& twin = units[static_cast<std::size_t>(unit.tied_to)];
    if (twin.trainable != unit.trainable || twin.parameters != unit.parameters)
      fail({"step: units ", u, " and ", unit.tied_to, " are tied, but differ in parameters or in being trainable"});
  }
  if (policy.prefetch < 0) fail({"step: prefetch is ", policy.prefetch, "; legal is 0 or more"});
  if (policy.level != zero_level::parameters && (policy.prefetch != 1 || !policy.reshard_after_forward))
    fail({"step: prefetch = ", policy.prefetch, " and reshard_after_forward = ", policy.reshard_after_forward ? 1 : 0,
          " would change nothing, because parameters stay gathered; they are for zero_level::parameters, and 1 and 1 "
          "are legal with the others"});
  if (policy.hybrid && policy.level == zero_level::replicated)
    fail(
        "step: hybrid = 1 would change nothing, because whole gradients are reduced over all data axes at once; it is "
        "for levels from zero_level::optimizer on, and 0 is legal here");
  if (policy.level == zero_level::parameters && policy.prefetch > count)
    fail({"step: prefetch is ", policy.prefetch, ", but there are ", count, " units to gather; legal is 0 to ", count});
}

/// Splits the passes of a rank into units; the messages between them stay.
constexpr std::vector<step_entry> passes_by_units(const step_schedule& s, int rank,
                                                  const std::vector<step_entry>& program) {
  std::vector<step_entry> out;
  for (const step_entry& line : program) {
    if (line.op != step_op::pass) {
      out.push_back(line);
      continue;
    }
    const int stage = s.shape.stage_of(rank, line.pass.chunk);
    std::vector<int> mine;
    for (std::size_t u = 0; u < s.units.size(); ++u)
      if (s.units[u].stage == stage) mine.push_back(static_cast<int>(u));
    if (line.pass.kind != action_kind::forward) std::reverse(mine.begin(), mine.end());
    for (const int u : mine) out.push_back({step_op::pass, u, line.pass});
  }
  return out;
}

/// Adds gathers and releases around the uses of units that are sharded between uses. Other entries keep their places.
constexpr std::vector<step_entry> with_gathers(const step_schedule& s, const std::vector<step_entry>& passes) {
  struct use {
    std::size_t at;  // in `passes`
    int unit;
  };
  std::vector<use> uses;
  for (std::size_t i = 0; i < passes.size(); ++i)
    if (passes[i].op == step_op::pass && reads_parameters(passes[i].pass.kind))
      for (const int u : s.used_by(passes[i].unit)) uses.push_back({i, u});
  // Whether the unit of use k stays gathered until its next use. It stays if it is not released after a forward pass,
  // or if its next gather would already have started. `end` is the end of the uses of k's pass.
  const auto keeps = [&](std::size_t k, std::size_t end) {
    for (std::size_t next = k + 1; next < uses.size(); ++next) {
      if (uses[next].unit != uses[k].unit) continue;
      if (!s.policy.reshard_after_forward && passes[uses[k].at].pass.kind == action_kind::forward) return true;
      return next < end + static_cast<std::size_t>(s.policy.prefetch);
    }
    return false;
  };
  std::vector<step_entry> out;
  std::vector<bool> gathered(s.units.size(), false);
  std::size_t ahead = 0, k = 0;  // the next use without a gather, and the next use
  for (std::size_t i = 0; i < passes.size(); ++i) {
    std::size_t end = k;  // end of the uses of this pass
    while (end < uses.size() && uses[end].at == i) ++end;
    for (; k < end && ahead < uses.size() && ahead < end + static_cast<std::size_t>(s.policy.prefetch); ++ahead) {
      const auto u = static_cast<std::size_t>(uses[ahead].unit);
      if (gathered[u]) continue;
      out.push_back({step_op::gather, uses[ahead].unit});
      gathered[u] = true;
    }
    out.push_back(passes[i]);
    for (; k < end; ++k) {
      if (keeps(k, end)) continue;
      out.push_back({step_op::release, uses[k].unit});
      gathered[static_cast<std::size_t>(uses[k].unit)] = false;
    }
  }
  return out;
}

/// Adds reductions: each directly after the last addition to its unit's gradient, or all at the end in that order.
constexpr std::vector<step_entry> with_reductions(const step_schedule& s, const std::vector<step_entry>& passes,
                                                  std::vector<int>& order) {
  std::vector<std::size_t> last(s.units.size(), passes.size());
  for (std::size_t i = 0; i < passes.size(); ++i)
    if (passes[i].op == step_op::pass && adds_gradient(passes[i].pass.kind))
      for (const int u : s.used_by(passes[i].unit)) last[static_cast<std::size_t>(u)] = i;
  std::vector<step_entry> out;
  for (std::size_t i = 0; i < passes.size(); ++i) {
    out.push_back(passes[i]);
    if (passes[i].op != step_op::pass) continue;
    for (const int u : s.used_by(passes[i].unit)) {
      const step_unit& unit = s.units[static_cast<std::size_t>(u)];
      if (last[static_cast<std::size_t>(u)] != i || !unit.trainable) continue;
      order.push_back(u);
      if (s.policy.overlap) out.push_back({step_op::reduce, u});
    }
  }
  if (!s.policy.overlap)
    for (const int u : order) out.push_back({step_op::reduce, u});
  return out;
}

/// In a hybrid, adds the second part of each reduction, which waits for the first, when the next unit's first part has
/// started.
constexpr std::vector<step_entry> with_copies(const std::vector<step_entry>& passes) {
  std::vector<step_entry> out;
  int reducing = -1;
  for (const step_entry& e : passes) {
    out.push_back(e);
    if (e.op != step_op::reduce) continue;
    if (reducing >= 0) out.push_back({step_op::reduce_copies, reducing});
    reducing = e.unit;
  }
  if (reducing >= 0) out.push_back({step_op::reduce_copies, reducing});
  return out;
}

/// Adds the sums over the stages that share parameters, after all other entries. The ranks of both stages must start
/// them in the same order. On one of them, the last gradient comes at the end of its passes.
constexpr std::vector<step_entry> with_ties(const step_schedule& s, std::vector<step_entry> passes,
                                            const std::vector<int>& order) {
  const auto twin_of = [&](int u) { return s.units[static_cast<std::size_t>(u)].tied_to; };
  std::vector<int> ties;
  for (const int u : order)
    if (twin_of(u) >= 0) ties.push_back(u);
  std::sort(ties.begin(), ties.end(), [&](int a, int b) { return std::min(a, twin_of(a)) < std::min(b, twin_of(b)); });
  for (const int u : ties) passes.push_back({step_op::reduce_ties, u});
  return passes;
}

/// Appends the norm, then the updates in the order of the next step's uses, each followed by the gather of the updated
/// values.
constexpr std::vector<step_entry> with_updates(const step_schedule& s, std::vector<step_entry> passes,
                                               std::vector<int> order, bool clips) {
  if (clips) passes.push_back({step_op::norm});
  std::sort(order.begin(), order.end());
  for (const int u : order) {
    passes.push_back({step_op::update, u});
    if (s.policy.level == zero_level::optimizer || s.policy.level == zero_level::gradients)
      passes.push_back({step_op::gather, u});
  }
  return passes;
}

/// Expands a step without checks.
constexpr step_schedule expanded(const schedule& s, std::vector<step_unit> units, const data_parallel& policy,
                                 const std::vector<std::vector<step_entry>>& programs) {
  step_schedule out{s.shape, policy, std::move(units), {}};
  for (int r = 0; r < s.shape.ranks; ++r) {
    std::vector<step_entry> entries = detail::passes_by_units(out, r, programs[static_cast<std::size_t>(r)]);
    std::vector<int> order;
    entries = detail::with_reductions(out, entries, order);
    if (policy.hybrid) entries = detail::with_copies(entries);
    entries = detail::with_ties(out, std::move(entries), order);
    if (policy.level == zero_level::parameters) entries = detail::with_gathers(out, entries);
    out.programs.push_back(detail::with_updates(out, entries, order, policy.clip && trains(s)));
  }
  return out;
}

/// Throws if a field has no effect on the step.
constexpr void refuse_idle_settings(const schedule& s, const step_schedule& made,
                                    const std::vector<std::vector<step_entry>>& programs) {
  const data_parallel& policy = made.policy;
  const auto same = [&](auto&& change) {
    data_parallel other = policy;
    change(other);
    return expanded(s, made.units, other, programs).programs == made.programs;
  };
  if (policy.prefetch > 1 && same([](data_parallel& p) { --p.prefetch; }))
    fail({"step: prefetch = ", policy.prefetch, " starts no gather earlier than ", policy.prefetch - 1,
          " does; legal is less"});
  if (!policy.reshard_after_forward && same([](data_parallel& p) { p.reshard_after_forward = true; }))
    fail(
        "step: reshard_after_forward = 0 would change nothing, because every unit is held from its forward to its "
        "backward pass anyway; legal is 1");
  if (!policy.overlap && same([](data_parallel& p) { p.overlap = true; }))
    fail("step: overlap = 0 would change nothing, because no pass comes after the first reduction; legal is 1");
}

/// Adds the entries before and after the passes of one unit and microbatch, whose places in the program are `at`.
constexpr void place_moves(const std::vector<step_entry>& program, const std::vector<std::size_t>& at, int ahead,
                           std::vector<std::vector<step_entry>>& before, std::vector<std::vector<step_entry>>& after) {
  for (std::size_t f = 0; f < at.size(); ++f) {
    const step_entry& keeps = program[at[f]];
    if (keeps.pass.kind != action_kind::forward) continue;
    std::size_t b = f + 1;
    const auto uses = [&](const step_entry& e) {
      return e.unit == keeps.unit && e.pass.microbatch == keeps.pass.microbatch;
    };
    while (b < at.size() && !uses(program[at[b]])) ++b;
    // The copy out takes one pass, the activations are away for at least one, and the copy back takes `ahead` passes.
    if (b == at.size() || b < f + 3 + static_cast<std::size_t>(ahead)) continue;
    after[f].push_back({step_op::offload, keeps.unit, keeps.pass, {}});
    after[f + 1].push_back({step_op::drop, keeps.unit, keeps.pass, {}});
    before[b - static_cast<std::size_t>(ahead)].push_back({step_op::reload, keeps.unit, keeps.pass, {}});
  }
}

}  // namespace detail

/// Returns a step whose activations are in the host's memory between the passes of a unit that make and use them. A
/// unit's offload follows its forward pass, and its drop follows the next pass of any unit. Its reload comes `ahead`
/// passes before its backward pass. Activations that would not be away during any pass stay on the device. `verify`
/// must accept the step.
constexpr step_schedule with_offload(step_schedule s, int ahead = 1) {
  if (ahead < 0) fail({"step: activations are reloaded ", ahead, " passes ahead; legal is 0 or more"});
  for (std::vector<step_entry>& program : s.programs) {
    std::vector<std::size_t> passes;
    for (std::size_t i = 0; i < program.size(); ++i)
      if (program[i].op == step_op::pass) passes.push_back(i);
    std::vector<std::vector<step_entry>> before(passes.size()), after(passes.size());
    detail::place_moves(program, passes, ahead, before, after);
    std::vector<step_entry> out;
    for (std::size_t i = 0, k = 0; i < program.size(); ++i) {
      const bool pass = program[i].op == step_op::pass;
      if (pass) out.insert(out.end(), before[k].begin(), before[k].end());
      out.push_back(program[i]);
      if (pass) out.insert(out.end(), after[k].begin(), after[k].end()), ++k;
    }
    program = std::move(out);
  }
  return s;
}

/// Returns the step of a pipeline's schedule; passes and messages keep the schedule's order. With
/// zero_level::parameters, a gather comes `prefetch` uses before each use, and a release after it. A unit's reduction
/// follows its last gradient; in a hybrid, the reduction of its copies follows the next unit's reduction. Sums over
/// stages that share parameters follow all reductions. Then come the norm, and the updates in the order of the next
/// step's uses, each followed by the gather of the updated values. A schedule of forward passes only has gathers and
/// releases only.
///
/// `verify` must accept the schedule. Throws `error` if units are not in the order of their stages, or if a field has
/// no effect.
constexpr step_schedule expand(const schedule& s, std::vector<step_unit> units, const data_parallel& policy,
                               const schedule_costs& costs = {}) {
  detail::require_legal("step", s.shape);
  detail::check_units(s.shape, units, policy);
  const std::vector<std::vector<step_entry>> programs = rank_program(s, costs);
  step_schedule out = detail::expanded(s, std::move(units), policy, programs);
  // With several ranks, a rank knows only its own units, and a field must be legal on all ranks or on none.
  if (s.shape.ranks == 1 && trains(s)) detail::refuse_idle_settings(s, out, programs);
  return out;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
