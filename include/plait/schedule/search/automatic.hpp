// Searches for a schedule for given costs and a limit on memory: the best of many candidates, no proven optimum.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/generators/controllable_memory.hpp"
#include "plait/schedule/generators/dualpipe_v.hpp"
#include "plait/schedule/generators/zero_bubble.hpp"
#include "plait/schedule/search/greedy.hpp"
#include "plait/schedule/search/refill.hpp"

namespace plait {

struct automatic_options {
  double max_activations = -1;  ///< of each rank, in microbatch-stages; negative: any
  bool by_span = false;     ///< least idle time within the ranks' spans, for steps that overlap; else least makespan
  int improvements = 4000;  ///< exchanges to try, at most, on the best order found
};

namespace detail {

/// The goal of the search: a small makespan, or the longest span of a rank.
inline double length_of(const simulation& times, bool by_span) {
  if (!by_span) return times.makespan;
  double longest = 0;
  for (std::size_t r = 0; r < times.ranks.size(); ++r) longest = std::max(longest, times.span(static_cast<int>(r)));
  return longest;
}

/// Exchanges neighbouring actions of a rank, and keeps what makes the schedule no longer. Deterministic.
inline void improve(schedule& s, const schedule_costs& costs, const automatic_options& options, double& length) {
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  const auto random = [&](std::size_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::size_t>((state >> 33) % n);
  };
  simulation times;
  std::vector<int> done;
  for (int k = 0; k < options.improvements; ++k) {
    auto& order = s.order[random(s.order.size())];
    if (order.size() < 2) continue;
    const std::size_t from = random(order.size());
    const std::size_t to = std::min(order.size() - 1, from + 1 + random(4));
    if (from == to) continue;
    // Moves one action behind up to four others, or the last of them before the others.
    const bool back = random(2) == 0;
    const auto first = order.begin() + static_cast<std::ptrdiff_t>(from);
    const auto end = order.begin() + static_cast<std::ptrdiff_t>(to) + 1;
    back ? std::rotate(first, first + 1, end) : std::rotate(first, end - 1, end);
    bool better = false;
    if (check_actions(s, options.max_activations).ok() && run_schedule(s, costs, times, done)) {
      const double now = length_of(times, options.by_span);
      better = now <= length;  // equal ones too: they lead out of a plateau
      if (better) length = now;
    }
    if (!better) back ? std::rotate(first, end - 1, end) : std::rotate(first, first + 1, end);
  }
}

}  // namespace detail

/// A schedule for uneven costs and a limit on memory: the best of a few greedy orders and of the hand-made schedules of
/// the same shape, also with their Ws placed anew, improved by exchanges. It is never longer than any hand-made one
/// that keeps to the limit. Takes milliseconds for 4 ranks and 12 microbatches, seconds for 16 and 128.
///
/// Every rank computes the same one, as long as all run one program on processors of one kind: products are rounded
/// differently where one fuses them with sums. Elsewhere, let one rank make it and hand it round as `to_csv`.
///
/// Throws `error` for sizes that are not legal, for `costs` as `simulate` does, and for a limit that no schedule keeps
/// to: every rank must hold at least one microbatch in each chunk.
inline schedule automatic(const pipeline_shape& shape, const schedule_costs& costs = {},
                          const automatic_options& options = {}) {
  detail::require_costs("schedule automatic", shape, costs);
  if (options.max_activations != options.max_activations)
    fail(
        "schedule automatic: max_activations is no number; legal are 1 and more, and any negative number for no limit");
  const int most = shape.chunks * shape.microbatches;
  const int limit = options.max_activations < 0
                        ? most
                        : static_cast<int>(std::min(options.max_activations * shape.chunks + 1e-9, 1.0 * most));
  if (limit < std::min(most, shape.chunks))
    fail({"schedule automatic: max_activations is ", options.max_activations, ", and a rank must keep at least 1"});

  schedule best;
  double length = detail::never;
  simulation times;
  std::vector<int> done;
  const auto consider = [&](schedule candidate) {
    if (!detail::check_actions(candidate, options.max_activations).ok() ||
        !detail::run_schedule(candidate, costs, times, done))
      return;
    const double its = detail::length_of(times, options.by_span);
    const double tie = 1e-9 * its;  // of equal lengths, the one that keeps less
    if (its > length + tie || (its > length - tie && peak_activations(candidate) >= peak_activations(best))) return;
    length = its;
    best = std::move(candidate);
  };
  const auto consider_hand_made = [&](const schedule& made) {
    consider(made);
    for (double patience : {0.0, 0.25, 0.5, 0.75, 1.0}) consider(refill_weights(made, costs, patience, limit));
  };
  const auto consider_policy = [&]<class Policy>(const Policy&) {
    const pipeline_shape its = shape_of<Policy>(shape.ranks, shape.microbatches);
    if (its == shape && check_shape<Policy>(its).ok()) consider_hand_made(Policy::make(its));
  };
  consider_policy(gpipe{});
  consider_policy(one_f_one_b{});
  consider_policy(zb_h1{});
  consider_policy(zb_h2{});
  consider_policy(zb_v{});
  consider_policy(dualpipe_v{});
  consider_policy(v_half{});
  consider_policy(v_min{});
  if (shape.placement == stage_placement::straight && shape.chunks > 1 && shape.microbatches % shape.ranks == 0)
    consider_hand_made(detail::make_interleaved("interleaved", shape));

  for (double warm_up : {1.0, 1.25, 1.5, 2.0, 3.0})
    for (double patience : {0.0, 0.25, 0.5, 0.75, 1.0})
      for (int flags = 0; flags < 16; ++flags) {
        const greedy_rule rule{warm_up,          patience,         (flags & 1) != 0,
                               (flags & 2) != 0, (flags & 4) != 0, (flags & 8) != 0};
        if (shape.chunks == 1 && rule.deep_first) continue;                // no difference
        if (!(rule.split && rule.keep_weights) && patience > 0) continue;  // no difference
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
