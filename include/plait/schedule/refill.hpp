#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "plait/schedule/greedy.hpp"

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
  const int m = shape.microbatches, last = shape.stages() - 1;
  schedule result{s.name, shape, std::vector<std::vector<action>>(s.order.size())};
  struct rank_state {
    std::vector<action> fixed;  ///< F and I in their order
    std::size_t next = 0;
    std::vector<action> pending;
    std::size_t oldest = 0;
    double free_at = 0;
    bool waiting = true;
    int held = 0;
  };
  std::vector<rank_state> ranks(s.order.size());
  for (std::size_t r = 0; r < ranks.size(); ++r)
    for (const action& a : s.order[r]) {
      if (a.kind == action_kind::forward) ranks[r].fixed.push_back(a);
      if (gives_input_gradient(a.kind)) ranks[r].fixed.push_back(input_backward_of(a.chunk, a.microbatch));
    }
  const auto cell = [&](int stage, int mb) { return static_cast<std::size_t>(stage * m + mb); };
  const auto cells = static_cast<std::size_t>(shape.stages() * m);
  std::vector<double> activation(cells, detail::never), gradient(cells, detail::never);  // when they arrive
  for (int mb = 0; mb < m; ++mb) activation[cell(0, mb)] = 0;

  for (;;) {
    const auto next = std::min_element(ranks.begin(), ranks.end(),
                                       [](const auto& a, const auto& b) { return a.free_at < b.free_at; });
    if (next->free_at == detail::never) break;
    rank_state& me = *next;
    const int r = static_cast<int>(next - ranks.begin());
    const double now = me.free_at;
    const bool has_weight = me.oldest < me.pending.size();
    double ready = detail::never;
    bool fits = true;
    if (me.next < me.fixed.size()) {
      const action& a = me.fixed[me.next];
      const bool forward = a.kind == action_kind::forward;
      ready = (forward ? activation : gradient)[cell(shape.stage_of(r, a.chunk), a.microbatch)];
      fits = !forward || me.held < max_chunks_held;
    }
    action chosen;
    if (has_weight) chosen = me.pending[me.oldest];
    const double gap = has_weight ? patience * costs.of(shape, chosen.kind, shape.stage_of(r, chosen.chunk)) : 0;
    if (has_weight && (!fits || ready > now + gap)) {
      ++me.oldest;
    } else if (fits && ready < detail::never) {
      if (ready > now) {  // known to come, and worth waiting for
        me.waiting = true;
        me.free_at = ready;
        continue;
      }
      chosen = me.fixed[me.next++];
    } else {
      me.waiting = true;
      me.free_at = detail::never;
      continue;
    }

    const int stage = shape.stage_of(r, chosen.chunk);
    const double end = now + costs.of(shape, chosen.kind, stage);
    result.order[static_cast<std::size_t>(r)].push_back(chosen);
    me.free_at = end;
    me.waiting = false;
    int to = -1;
    if (chosen.kind == action_kind::forward) {
      ++me.held;
      if (stage == last)
        gradient[cell(stage, chosen.microbatch)] = end;
      else
        to = stage + 1;
    } else if (chosen.kind == action_kind::input_backward) {
      if (stage > 0) to = stage - 1;
      me.pending.push_back(weight_backward_of(chosen.chunk, chosen.microbatch));
    } else {
      --me.held;
    }
    if (to >= 0) {
      const double arrival = end + costs.of_link(shape, r, shape.rank_of(to));
      (to > stage ? activation : gradient)[cell(to, chosen.microbatch)] = arrival;
      rank_state& peer = ranks[static_cast<std::size_t>(shape.rank_of(to))];
      if (peer.waiting) peer.free_at = std::min(peer.free_at, std::max(arrival, now));
    }
  }
  return result;
}

}  // namespace plait
