// A schedule as one program for each rank: its actions, with the sends and receives that they need. The times that
// order them are from schedule/simulate.hpp.
#pragma once

#include <cstddef>
#include <vector>

#include "plait/schedule/simulate.hpp"
#include "plait/schedule/step_entry.hpp"

namespace plait {

/// The computations, sends and receives of every rank, in the one order that every backend follows.
///
/// The communication of a rank is the projection of the global transfer list (`simulation::transfers`) onto it, merged
/// with its actions: a send follows the action that makes it, a receive precedes the first action that ends after the
/// message was sent, and so the one that needs it. All programs are sorted by one order of events (simulated time, then
/// `sequence`), and so no deadlock is possible, even when every step blocks and each rank has a single queue.
///
/// An executor runs the entries in order:
///
///     for (const step_entry& e : programs[rank]) switch (e.op) {
///       case step_op::receive: post(e.transfer); break;              // returns at once
///       case step_op::pass:    wait_for_input(e.pass); compute(e.pass); break;
///       default:               post(e.transfer);                     // a send: returns at once
///     }
///
/// Posting is meant not to block: a receive may stand some actions before its message is sent, so that it is there when
/// it is needed. Throws as `simulate`.
constexpr std::vector<std::vector<step_entry>> rank_program(const schedule& s, const simulation& times) {
  const pipeline_shape& shape = s.shape;
  std::vector<std::vector<step_entry>> programs(static_cast<std::size_t>(shape.ranks));
  std::vector<std::size_t> next(programs.size(), 0);
  for (std::size_t r = 0; r < programs.size(); ++r) programs[r].reserve(times.ranks[r].size() * 3);

  // Actions up to the place of a transfer in the order of events.
  const auto advance = [&](std::size_t rank, const timed_transfer* until) {
    const std::vector<timed_action>& mine = times.ranks[rank];
    for (std::size_t& i = next[rank]; i < mine.size(); ++i) {
      const timed_action& a = mine[i];
      if (until && (a.end != until->sent ? a.end > until->sent : a.sequence > until->sequence)) break;
      programs[rank].push_back({step_op::pass, -1, a.action, {}});
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

}  // namespace plait
