#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "plait/schedule/verify.hpp"

namespace plait {

/// How a greedy scheduler decides. `automatic` tries a few.
struct greedy_rule {
  double warm_up = 1;          ///< forwards ahead of backwards on rank r: at most warm_up * (p - r), at least 1
  double patience = 0.5;       ///< waits for an input that is known to come within this share of a W's time
  bool forward_first = false;  ///< where a forward and an input gradient are both there
  bool deep_first = true;      ///< of forwards in several chunks, the last chunk's first
  bool keep_weights = true;    ///< W only where a rank would idle, or where memory asks for it; else after each I
  bool split = true;           ///< I and W; else whole backwards B
};

namespace detail {

inline constexpr double never = std::numeric_limits<double>::infinity();

/// One rank's books while actions are laid out in the order of time.
struct greedy_rank {
  double free_at = 0;                          ///< when it decides next
  bool waiting = true;                         ///< it idles until then, and may be woken earlier
  int held = 0;                                ///< activations, in chunks
  std::vector<int> forwards, inputs, weights;  ///< done, of each chunk
  std::vector<action> pending;                 ///< I done and W not, oldest first
  std::size_t oldest = 0;
};

}  // namespace detail

/// Lays out actions in the order of simulated time: each rank, whenever it is free, takes what its inputs allow by
/// `rule`, within `max_chunks_held` activations. Deterministic. An order that gets stuck is returned incomplete. Throws
/// `error` for sizes that are not legal, and for `costs` as `simulate` does.
inline schedule make_greedy(const pipeline_shape& shape, const schedule_costs& costs, const greedy_rule& rule,
                            int max_chunks_held) {
  detail::require_costs("make_greedy", shape, costs);
  const int p = shape.ranks, v = shape.chunks, m = shape.microbatches, last = shape.stages() - 1;
  schedule s{"automatic", shape, std::vector<std::vector<action>>(static_cast<std::size_t>(p))};
  const auto cell = [&](int stage, int mb) { return static_cast<std::size_t>(stage * m + mb); };
  const auto cells = static_cast<std::size_t>(shape.stages() * m);
  std::vector<double> activation(cells, detail::never), gradient(cells, detail::never);  // when they arrive
  for (int mb = 0; mb < m; ++mb) activation[cell(0, mb)] = 0;
  std::vector<detail::greedy_rank> ranks(static_cast<std::size_t>(p));
  for (auto& rank : ranks)
    rank.forwards = rank.inputs = rank.weights = std::vector<int>(static_cast<std::size_t>(v), 0);

  for (;;) {
    const auto next = std::min_element(ranks.begin(), ranks.end(),
                                       [](const auto& a, const auto& b) { return a.free_at < b.free_at; });
    if (next->free_at == detail::never) break;
    detail::greedy_rank& me = *next;
    const int r = static_cast<int>(next - ranks.begin());
    const double now = me.free_at;

    // The best action that is ready, and the soonest that is known to become so.
    double soonest = detail::never;
    int forward = -1, backward = -1;
    // No more than there are, so that any factor fits an int; std::max in this order gives 1 for what is no number.
    const int in_flight_limit =
        static_cast<int>(std::max(1.0, std::min(1.0 * m * v, std::floor(rule.warm_up * (p - r) * v + 0.5))));
    const bool room = me.held < max_chunks_held;
    int ahead = 0;
    for (int c = 0; c < v; ++c)
      ahead += me.forwards[static_cast<std::size_t>(c)] - me.inputs[static_cast<std::size_t>(c)];
    for (int k = 0; k < v; ++k) {
      const int c = rule.deep_first ? v - 1 - k : k;
      const int stage = shape.stage_of(r, c);
      const int f = me.forwards[static_cast<std::size_t>(c)], i = me.inputs[static_cast<std::size_t>(c)];
      // A later chunk's forward frees more than it keeps: only the first is held back by the limit on what is ahead.
      // The last activation that fits is left to later chunks, on which everything waits.
      const bool fits = room && (c > 0 || (ahead < in_flight_limit && me.held + v - 1 < max_chunks_held));
      if (f < m && fits) {
        if (const double at = activation[cell(stage, f)]; at > now)
          soonest = std::min(soonest, at);
        else if (forward < 0)
          forward = c;
      }
      if (i < f) {
        if (const double at = gradient[cell(stage, i)]; at > now)
          soonest = std::min(soonest, at);
        else if (backward < 0)
          backward = c;
      }
    }
    const bool has_weight = me.oldest < me.pending.size();
    const double weight_time =
        has_weight ? costs.of(shape, action_kind::weight_backward, shape.stage_of(r, me.pending[me.oldest].chunk)) : 0;
    action chosen;
    bool found = true;
    if (!rule.keep_weights && has_weight) {
      chosen = me.pending[me.oldest];
    } else if (forward >= 0 && (backward < 0 || rule.forward_first)) {
      chosen = forward_of(forward, me.forwards[static_cast<std::size_t>(forward)]);
    } else if (backward >= 0) {
      const int i = me.inputs[static_cast<std::size_t>(backward)];
      chosen = rule.split ? input_backward_of(backward, i) : backward_of(backward, i);
    } else if (has_weight && (soonest >= now + rule.patience * weight_time || !room)) {
      chosen = me.pending[me.oldest];
    } else {
      found = false;
    }
    if (!found) {
      me.waiting = true;
      me.free_at = soonest;
      continue;
    }

    const int stage = shape.stage_of(r, chosen.chunk);
    const auto chunk = static_cast<std::size_t>(chosen.chunk);
    const double end = now + costs.of(shape, chosen.kind, stage);
    s.order[static_cast<std::size_t>(r)].push_back(chosen);
    me.free_at = end;
    me.waiting = false;
    int to = -1;
    if (chosen.kind == action_kind::forward) {
      ++me.forwards[chunk];
      ++me.held;
      if (stage == last)
        gradient[cell(stage, chosen.microbatch)] = end;
      else
        to = stage + 1;
    } else if (gives_input_gradient(chosen.kind)) {
      ++me.inputs[chunk];
      if (stage > 0) to = stage - 1;
      if (rule.split) me.pending.push_back(weight_backward_of(chosen.chunk, chosen.microbatch));
    } else {
      ++me.oldest;
    }
    if (frees_activations(chosen.kind)) --me.held;
    if (to >= 0) {
      const double arrival = end + costs.of_link(shape, r, shape.rank_of(to));
      (to > stage ? activation : gradient)[cell(to, chosen.microbatch)] = arrival;
      detail::greedy_rank& peer = ranks[static_cast<std::size_t>(shape.rank_of(to))];
      if (peer.waiting) peer.free_at = std::min(peer.free_at, std::max(arrival, now));
    }
  }
  return s;
}

}  // namespace plait
