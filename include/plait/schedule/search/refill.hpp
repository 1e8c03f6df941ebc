// Places the weight gradients W of a schedule anew for given costs, for schedule/search/automatic.hpp; start there.
// Forwards and input gradients are not reordered: schedule/search/greedy.hpp orders all actions from nothing.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/search/event_loop.hpp"
#include "plait/schedule/verify.hpp"

namespace plait {

/// The schedule `s` with each backward split and every W placed anew for these costs: forwards and input gradients keep
/// their order on each rank; a W, the oldest first, is done where the next of them would come later than `patience`
/// times the W's length, and where a forward would exceed `max_chunks_held` activations. What a hand-made order for
/// even costs loses on uneven ones is mostly in its Ws. Deterministic. A result that gets stuck is returned incomplete.
/// `s` must be one that `verify` accepts; throws `error` for sizes that are not legal, and for `costs` as `simulate`
/// does.
inline schedule refill_weights(const schedule& s, const schedule_costs& costs, double patience, int max_chunks_held) {
  detail::require_costs("refill_weights", s.shape, costs);
  if (const schedule_verdict v = detail::check_actions(s, -1); !v.ok()) fail({"refill_weights: ", describe(v)});
  const pipeline_shape& shape = s.shape;
  struct fixed_actions {
    std::vector<action> order;  ///< F and I
    std::size_t next = 0;
  };
  std::vector<fixed_actions> fixed(s.order.size());
  for (std::size_t r = 0; r < fixed.size(); ++r)
    for (const action& a : s.order[r]) {
      if (a.kind == action_kind::forward) fixed[r].order.push_back(a);
      if (gives_input_gradient(a.kind)) fixed[r].order.push_back(input_backward_of(a.chunk, a.microbatch));
    }

  return detail::lay_out(
      s.name, shape, costs,
      [&](int r, detail::search_rank& me, double now, detail::arrivals& known) -> std::optional<action> {
        auto& [order, next] = fixed[static_cast<std::size_t>(r)];
        double ready = detail::never;
        bool fits = true;
        if (next < order.size()) {
          const action& a = order[next];
          const int stage = shape.stage_of(r, a.chunk);
          const bool forward = a.kind == action_kind::forward;
          ready = forward ? known.activation(stage, a.microbatch) : known.gradient(stage, a.microbatch);
          fits = !forward || me.held < max_chunks_held;
        }
        if (me.has_weight()) {
          const action& weight = me.pending[me.oldest];
          const double gap = patience * costs.of(shape, weight.kind, shape.stage_of(r, weight.chunk));
          if (!fits || ready > now + gap) return weight;
        }
        if (fits && ready <= now) return order[next++];
        me.free_at = fits ? ready : detail::never;  // known to come, and worth waiting for
        return std::nullopt;
      });
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
