// A greedy scheduler, which makes candidates for schedule/search/automatic.hpp; start there. Its result is neither
// verified nor always complete: schedule/verify.hpp says.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/search/event_loop.hpp"

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

/// The actions that one rank has done, of each chunk.
struct greedy_counts {
  std::vector<int> forwards, inputs;
};

}  // namespace detail

/// Lays out actions in the order of simulated time: each rank, whenever it is free, takes what its inputs allow by
/// `rule`, within `max_chunks_held` activations. Deterministic. An order that gets stuck is returned incomplete. Throws
/// `error` for sizes that are not legal, and for `costs` as `simulate` does.
inline schedule make_greedy(const pipeline_shape& shape, const schedule_costs& costs, const greedy_rule& rule,
                            int max_chunks_held) {
  detail::require_costs("make_greedy", shape, costs);
  const int p = shape.ranks, v = shape.chunks, m = shape.microbatches;
  const std::vector<int> none(static_cast<std::size_t>(v), 0);
  std::vector<detail::greedy_counts> done(static_cast<std::size_t>(p), {none, none});

  return detail::lay_out(
      "automatic", shape, costs,
      [&](int r, detail::search_rank& me, double now, detail::arrivals& known) -> std::optional<action> {
        auto& [forwards, inputs] = done[static_cast<std::size_t>(r)];
        // The best action that is ready, and the soonest that is known to become so.
        double soonest = detail::never;
        int forward = -1, backward = -1;
        // No more than there are, so that any factor fits an int; std::max in this order gives 1 for what is no number.
        const int in_flight_limit =
            static_cast<int>(std::max(1.0, std::min(1.0 * m * v, std::floor(rule.warm_up * (p - r) * v + 0.5))));
        const bool room = me.held < max_chunks_held;
        int ahead = 0;
        for (int c = 0; c < v; ++c)
          ahead += forwards[static_cast<std::size_t>(c)] - inputs[static_cast<std::size_t>(c)];
        for (int k = 0; k < v; ++k) {
          const int c = rule.deep_first ? v - 1 - k : k;
          const int stage = shape.stage_of(r, c);
          const int f = forwards[static_cast<std::size_t>(c)], i = inputs[static_cast<std::size_t>(c)];
          // A later chunk's forward frees more than it keeps: only the first is held back by the limit on what is
          // ahead. The last activation that fits is left to later chunks, on which everything waits.
          const bool fits = room && (c > 0 || (ahead < in_flight_limit && me.held + v - 1 < max_chunks_held));
          if (f < m && fits) {
            if (const double at = known.activation(stage, f); at > now)
              soonest = std::min(soonest, at);
            else if (forward < 0)
              forward = c;
          }
          if (i < f) {
            if (const double at = known.gradient(stage, i); at > now)
              soonest = std::min(soonest, at);
            else if (backward < 0)
              backward = c;
          }
        }
        const double weight_time = me.has_weight() ? costs.of(shape, action_kind::weight_backward,
                                                              shape.stage_of(r, me.pending[me.oldest].chunk))
                                                   : 0;
        if (!rule.keep_weights && me.has_weight()) return me.pending[me.oldest];
        if (forward >= 0 && (backward < 0 || rule.forward_first))
          return forward_of(forward, forwards[static_cast<std::size_t>(forward)]++);
        if (backward >= 0) {
          const int i = inputs[static_cast<std::size_t>(backward)]++;
          return rule.split ? input_backward_of(backward, i) : backward_of(backward, i);
        }
        if (me.has_weight() && (soonest >= now + rule.patience * weight_time || !room)) return me.pending[me.oldest];
        me.free_at = soonest;
        return std::nullopt;
      });
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
