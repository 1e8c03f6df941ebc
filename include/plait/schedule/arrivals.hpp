// Which messages of a pipeline must have arrived when a rank computes, by its schedule alone: where nobody can be
// asked, as while a step is recorded, it says when the memory of a send is free.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/schedule/posting.hpp"

namespace plait {

namespace detail {

/// Returns what `arrived_sends` does, in constant expressions.
constexpr std::vector<std::vector<std::size_t>> find_arrived_sends(const pipeline_shape& shape,
                                                                   const std::vector<std::vector<step_entry>>& programs,
                                                                   int rank) {
  using clock = std::vector<std::size_t>;  // how many steps of each rank lie before
  struct message {
    clock sent;             // empty: not yet, or taken
    std::size_t taken = 0;  // the receiver's steps up to the action that takes it; 0: not yet
  };
  const std::size_t ranks = programs.size();
  std::vector<message> messages(slots(shape));
  std::vector<clock> now(ranks, clock(ranks, 0));
  std::vector<std::vector<std::size_t>> arrived(programs[static_cast<std::size_t>(rank)].size());
  std::vector<std::pair<std::size_t, transfer>> open;  // sends of `rank`
  std::size_t sends = 0;

  const auto take = [&](std::size_t r, const step_entry& step) {  // false: the message is not yet sent
    transfer t;
    if (!input_of(shape, static_cast<int>(r), step.pass, t)) return true;
    message& m = messages[slot_of(shape, t)];
    if (m.sent.empty()) return false;
    for (std::size_t i = 0; i < ranks; ++i)
      if (m.sent[i] > now[r][i]) now[r][i] = m.sent[i];
    m.taken = now[r][r] + 1;
    m.sent = clock();
    return true;
  };
  const auto look = [&](const clock& mine, std::vector<std::size_t>& out) {
    std::size_t left = 0;
    for (const auto& [number, t] : open) {
      const std::size_t taken = messages[slot_of(shape, t)].taken;
      if (taken != 0 && mine[static_cast<std::size_t>(shape.rank_of(t.to_stage))] >= taken)
        out.push_back(number);
      else
        open[left++] = {number, t};
    }
    open.resize(left);
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < ranks; ++r) {
      for (std::size_t& i = now[r][r]; i < programs[r].size(); ++i, moved = true) {
        const step_entry& step = programs[r][i];
        if (step.op == step_op::pass && !take(r, step)) break;
        const bool mine = static_cast<int>(r) == rank;
        if (step.op == step_op::pass && mine) look(now[r], arrived[i]);
        if (step.op != step_op::send) continue;
        messages[slot_of(shape, step.transfer)].sent = now[r];
        if (mine) open.emplace_back(sends++, step.transfer);
      }
    }
  }
  return arrived;
}

/// Does so at run time; it is compiled once (core/compiled.hpp).
std::vector<std::vector<std::size_t>> arrived_sends_at_run_time(const pipeline_shape& shape,
                                                                const std::vector<std::vector<step_entry>>& programs,
                                                                int rank);

}  // namespace detail

/// For each step of the program of `rank`: those of its earlier sends, counted from 0, that have arrived for certain
/// once a compute has its input, and had not for certain before. The receiver has begun the action that takes the
/// message, for what it has computed since came here, maybe by way of others (vector clocks: Fidge 1988, Mattern 1989).
/// `programs` are those of all ranks, of a verified schedule.
constexpr std::vector<std::vector<std::size_t>> arrived_sends(const pipeline_shape& shape,
                                                              const std::vector<std::vector<step_entry>>& programs,
                                                              int rank) {
  if (std::is_constant_evaluated()) return detail::find_arrived_sends(shape, programs, rank);
  return detail::arrived_sends_at_run_time(shape, programs, rank);
}

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/schedule/arrivals.ipp"  // IWYU pragma: keep
#endif
