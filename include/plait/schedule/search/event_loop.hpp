// The loop that the searched orders share: ranks take actions in the order of simulated time, as a function chooses.
// It makes an order; the times of a given one are in schedule/simulate.hpp. Users: schedule/search/automatic.hpp and
// schedule/search/automatic.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <optional>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/simulate.hpp"

namespace plait::detail {

inline constexpr double never = std::numeric_limits<double>::infinity();

/// One rank's state while actions are laid out in the order of time.
struct search_rank {
  double free_at = 0;           ///< when it decides next
  bool waiting = true;          ///< it idles until then, and may be woken earlier
  int held = 0;                 ///< activations, in chunks
  std::vector<action> pending;  ///< W of I that are done, oldest first
  std::size_t oldest = 0;       ///< of `pending`, the first that is not done

  bool has_weight() const { return oldest < pending.size(); }
};

/// When activations and gradients arrive at each stage for each microbatch, as far as it is known.
class arrivals {
 public:
  explicit arrivals(const pipeline_shape& shape)
      : microbatches_(shape.microbatches),
        activation_(static_cast<std::size_t>(shape.stages() * shape.microbatches), never),
        gradient_(activation_) {
    for (int mb = 0; mb < microbatches_; ++mb) activation(0, mb) = 0;
  }
  double& activation(int stage, int microbatch) { return activation_[cell(stage, microbatch)]; }
  double& gradient(int stage, int microbatch) { return gradient_[cell(stage, microbatch)]; }

 private:
  std::size_t cell(int stage, int microbatch) const {
    return static_cast<std::size_t>(stage * microbatches_ + microbatch);
  }

  int microbatches_;
  std::vector<double> activation_, gradient_;
};

/// Lays out actions in the order of simulated time. Whenever a rank is free, `choose(rank, state, now, arrivals)` gives
/// its next action, or none, and has then set `state.free_at` to the time at which the rank asks again, unless an
/// arrival wakes it earlier. Ends when no rank has anything to wait for.
template <class Choose>
schedule lay_out(const schedule_name& name, const pipeline_shape& shape, const schedule_costs& costs, Choose&& choose) {
  const int last = shape.stages() - 1;
  schedule s{name, shape, std::vector<std::vector<action>>(static_cast<std::size_t>(shape.ranks))};
  arrivals known(shape);
  std::vector<search_rank> ranks(static_cast<std::size_t>(shape.ranks));
  for (;;) {
    const auto next = std::min_element(ranks.begin(), ranks.end(),
                                       [](const auto& a, const auto& b) { return a.free_at < b.free_at; });
    if (next->free_at == never) return s;
    search_rank& me = *next;
    const int r = static_cast<int>(next - ranks.begin());
    const double now = me.free_at;
    const std::optional<action> chosen = choose(r, me, now, known);
    me.waiting = !chosen;
    if (!chosen) continue;

    const int stage = shape.stage_of(r, chosen->chunk);
    const double end = now + costs.of(shape, chosen->kind, stage);
    s.order[static_cast<std::size_t>(r)].push_back(*chosen);
    me.free_at = end;
    int to = -1;
    if (chosen->kind == action_kind::forward) {
      ++me.held;
      if (stage == last)
        known.gradient(stage, chosen->microbatch) = end;
      else
        to = stage + 1;
    } else if (gives_input_gradient(chosen->kind)) {
      if (stage > 0) to = stage - 1;
      if (chosen->kind == action_kind::input_backward)
        me.pending.push_back(weight_backward_of(chosen->chunk, chosen->microbatch));
    } else {
      ++me.oldest;
    }
    if (frees_activations(chosen->kind)) --me.held;
    if (to < 0) continue;
    const double arrival = end + costs.of_link(shape, r, shape.rank_of(to));
    (to > stage ? known.activation(to, chosen->microbatch) : known.gradient(to, chosen->microbatch)) = arrival;
    search_rank& peer = ranks[static_cast<std::size_t>(shape.rank_of(to))];
    if (peer.waiting) peer.free_at = std::min(peer.free_at, std::max(arrival, now));
  }
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
