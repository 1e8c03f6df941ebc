// Searches a schedule for given costs and a memory limit: the best of many candidates, without a proof of optimality.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/generators.hpp"
#include "plait/schedule/simulate.hpp"
#include "plait/schedule/verify.hpp"

namespace plait {

namespace detail {

inline constexpr double never = std::numeric_limits<double>::infinity();

/// The state of one rank during the search.
struct search_rank {
  double free_at = 0;           ///< time of its next decision
  bool waiting = true;          ///< idle until then; an arrival may wake it earlier
  int held = 0;                 ///< activations, in chunks
  std::vector<action> pending;  ///< a W for each I that has run, oldest first
  std::size_t oldest = 0;       ///< index of the first W in `pending` that has not run

  bool has_weight() const { return oldest < pending.size(); }
};

/// The known arrival times of activations and gradients at each stage, for each microbatch.
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

/// Builds a schedule in the order of simulated time. Whenever a rank is free, `choose(rank, state, now, arrivals)`
/// returns its next action or none. For none it sets `state.free_at`, the time of the rank's next decision, unless an
/// arrival wakes the rank earlier. It ends when no rank waits for anything.
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
    const int to = target_of(shape, chosen->kind, stage);
    if (chosen->kind == action_kind::forward) {
      ++me.held;
      if (stage == last) known.gradient(stage, chosen->microbatch) = end;
    }
    if (chosen->kind == action_kind::input_backward)
      me.pending.push_back(weight_backward_of(chosen->chunk, chosen->microbatch));
    if (chosen->kind == action_kind::weight_backward) ++me.oldest;
    if (frees_activations(chosen->kind)) --me.held;
    if (to < 0) continue;
    const double arrival = end + costs.of_link(shape, r, shape.rank_of(to));
    (to > stage ? known.activation(to, chosen->microbatch) : known.gradient(to, chosen->microbatch)) = arrival;
    search_rank& peer = ranks[static_cast<std::size_t>(shape.rank_of(to))];
    if (peer.waiting) peer.free_at = std::min(peer.free_at, std::max(arrival, now));
  }
}

}  // namespace detail

// Moves the weight gradients W of a schedule for given costs, without reordering forwards and input gradients.

/// Returns the schedule `s` with each backward split, and every W moved for these costs. Forwards and input gradients
/// keep their order on each rank. The oldest W runs if the rank would otherwise wait longer than `patience` times its
/// length. It also runs if a forward would exceed `max_chunks_held` activations. Orders for even costs lose time on
/// uneven ones mostly by the places of their Ws.
///
/// A result that gets stuck is incomplete. `s` must be a schedule that `verify` accepts. Throws `error` for illegal
/// sizes, and for `costs` like `simulate`.
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
        me.free_at = fits ? ready : detail::never;  // arrives soon enough to wait for it
        return std::nullopt;
      });
}

// A greedy scheduler that makes candidates. Its results are not verified and may be incomplete.

/// The rules by which a greedy scheduler decides. `automatic` tries several.
struct greedy_rule {
  double warm_up = 1;          ///< forwards before the first backward on rank r: at most warm_up * (p - r), at least 1
  double patience = 0.5;       ///< waits for a known input for at most this fraction of a W's time
  bool forward_first = false;  ///< if a forward and an input gradient are both ready
  bool deep_first = true;      ///< forwards of the last chunk before those of earlier ones
  bool keep_weights = true;    ///< W only if the rank would idle or memory requires it; else after each I
  bool split = true;           ///< I and W; else whole backwards B
};

/// Builds a schedule in the order of simulated time: each free rank takes a ready action by `rule`, within
/// `max_chunks_held` activations. Deterministic. An order that gets stuck is returned incomplete. Throws `error` for
/// illegal sizes, and for `costs` like `simulate`.
inline schedule make_greedy(const pipeline_shape& shape, const schedule_costs& costs, const greedy_rule& rule,
                            int max_chunks_held) {
  detail::require_costs("make_greedy", shape, costs);
  const int p = shape.ranks, v = shape.chunks, m = shape.microbatches;
  struct counts {
    std::vector<int> forwards, inputs;  ///< actions that a rank has run, of each chunk
  };
  const std::vector<int> none(static_cast<std::size_t>(v), 0);
  std::vector<counts> done(static_cast<std::size_t>(p), {none, none});

  return detail::lay_out(
      "automatic", shape, costs,
      [&](int r, detail::search_rank& me, double now, detail::arrivals& known) -> std::optional<action> {
        auto& [forwards, inputs] = done[static_cast<std::size_t>(r)];
        // The best action that is ready, and the earliest known time at which another becomes ready.
        double soonest = detail::never;
        int forward = -1, backward = -1;
        // Limited by the number of forwards, so any factor fits an int. In this order of arguments, std::max returns 1
        // for NaN.
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
          // Later chunks' forwards free more memory than they keep, so the in-flight limit only applies to the first
          // chunk. The last free activation is reserved for later chunks, because all ranks wait for them.
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

struct automatic_options {
  double max_activations = -1;  ///< of each rank, in microbatch-stages; negative: no limit
  bool by_span = false;         ///< minimise idle time within ranks' spans, for steps that overlap; else the makespan
  int improvements = 4000;      ///< the most exchanges to try on the best order found
};

namespace detail {

/// Returns the number of chunk activations that a rank may keep. Throws `error` for a limit that no schedule meets.
inline int chunks_limit(const pipeline_shape& shape, const automatic_options& options) {
  if (options.max_activations != options.max_activations)
    fail(
        "schedule automatic: max_activations is not a number; legal are 1 and more, and any negative number for no "
        "limit");
  const int most = shape.chunks * shape.microbatches;
  const int limit = options.max_activations < 0
                        ? most
                        : static_cast<int>(std::min(options.max_activations * shape.chunks + 1e-9, 1.0 * most));
  if (limit < std::min(most, shape.chunks))
    fail({"schedule automatic: max_activations is ", options.max_activations, ", and a rank must keep at least 1"});
  return limit;
}

/// The quantity to minimise: the makespan, or the longest span of a rank.
inline double length_of(const simulation& times, bool by_span) {
  if (!by_span) return times.makespan;
  double longest = 0;
  for (std::size_t r = 0; r < times.ranks.size(); ++r) longest = std::max(longest, times.span(static_cast<int>(r)));
  return longest;
}

/// Exchanges adjacent actions of a rank, and keeps exchanges that do not make the schedule longer. Deterministic.
inline void improve(schedule& s, const schedule_costs& costs, const automatic_options& options, double& length) {
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  const auto random = [&](std::size_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>((state >> 33) % n);
  };
  simulation times;
  for (int k = 0; k < options.improvements; ++k) {
    auto& order = s.order[random(s.order.size())];
    if (order.size() < 2) continue;
    const std::size_t from = random(order.size());
    const std::size_t to = std::min(order.size() - 1, from + 1 + random(4));
    if (from == to) continue;
    // Moves one action past up to four later ones, or the last of these before the others.
    const bool back = random(2) == 0;
    const auto first = order.begin() + static_cast<std::ptrdiff_t>(from);
    const auto end = order.begin() + static_cast<std::ptrdiff_t>(to) + 1;
    back ? std::rotate(first, first + 1, end) : std::rotate(first, end - 1, end);
    bool better = false;
    if (check_actions(s, options.max_activations).ok() && run_schedule(s, costs, times)) {
      const double now = length_of(times, options.by_span);
      better = now <= length;  // equal lengths too, which lead out of a plateau
      if (better) length = now;
    }
    if (!better) back ? std::rotate(first, end - 1, end) : std::rotate(first, first + 1, end);
  }
}

}  // namespace detail

/// Returns a schedule for uneven costs and a memory limit. It is the best of several greedy orders and of the hand-made
/// schedules of this shape, also with moved Ws; exchanges then improve it. It is never longer than a hand-made schedule
/// within the limit. The search takes milliseconds for 4 ranks and 12 microbatches, and seconds for 16 and 128.
///
/// Every rank computes the same schedule if all run one program on processors of one kind. Some processors fuse
/// products with sums, which rounds differently. With several kinds of processors, let one rank compute the schedule
/// and send it to the others as `to_csv`.
///
/// Throws `error` for illegal sizes, for `costs` like `simulate`, and for a limit that no schedule meets: every rank
/// must hold at least one microbatch in each chunk.
inline schedule automatic(const pipeline_shape& shape, const schedule_costs& costs = {},
                          const automatic_options& options = {}) {
  detail::require_costs("schedule automatic", shape, costs);
  const int limit = detail::chunks_limit(shape, options);

  schedule best;
  double length = detail::never;
  simulation times;
  const auto consider = [&](schedule candidate) {
    if (!detail::check_actions(candidate, options.max_activations).ok() ||
        !detail::run_schedule(candidate, costs, times))
      return;
    const double its = detail::length_of(times, options.by_span);
    const double tie = 1e-9 * its;  // among equal lengths, prefers fewer activations
    if (its > length + tie || (its > length - tie && peak_activations(candidate) >= peak_activations(best))) return;
    length = its;
    best = std::move(candidate);
  };
  const auto consider_hand_made = [&](const schedule& made) {
    consider(made);
    for (double patience : {0.0, 0.25, 0.5, 0.75, 1.0}) consider(refill_weights(made, costs, patience, limit));
  };
  const auto consider_policy = [&]<class Policy>(const type_list<Policy>&) {
    const pipeline_shape its = shape_of<Policy>(shape.ranks, shape.microbatches);
    if (its == shape && check_shape<Policy>(its).ok()) consider_hand_made(Policy::make(its));
  };
  [&]<class... Policies>(const type_list<Policies...>&) {
    (consider_policy(type_list<Policies>{}), ...);
  }(detail::hand_made_policies{});
  if (shape.placement == stage_placement::straight && shape.chunks > 1 && shape.microbatches % shape.ranks == 0)
    consider_hand_made(detail::make_interleaved("interleaved", shape));

  for (double warm_up : {1.0, 1.25, 1.5, 2.0, 3.0})
    for (double patience : {0.0, 0.25, 0.5, 0.75, 1.0})
      for (int flags = 0; flags < 16; ++flags) {
        const greedy_rule rule{warm_up,          patience,         (flags & 1) != 0,
                               (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0};
        if (shape.chunks == 1 && rule.deep_first) continue;                // equal to another rule
        if (!(rule.split && rule.keep_weights) && patience > 0) continue;  // equal to another rule
        consider(make_greedy(shape, costs, rule, limit));
      }
  if (best.order.empty())
    fail({"schedule automatic: no order of ", shape.stages(), " stages and ", shape.microbatches,
          " microbatches was found that keeps at most ", options.max_activations, " activations on each rank"});
  detail::improve(best, costs, options, length);
  best.name = "automatic";
  return best;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
