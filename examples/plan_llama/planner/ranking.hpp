// Ranks the layouts of a search for display. Variants of one layout are joined. The fastest layouts by formulas are
// simulated on the links that their ranks share, because slow networks change the order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "plan_llama/planner/search.hpp"
#include "plan_llama/planner/step_on_links.hpp"

namespace plait::planner {

/// A layout with the seconds by which it is ranked, and the number of its variants.
struct ranked_layout {
  layout_price price;
  double seconds = 0;         ///< of a step, simulated on shared links or by formulas
  bool simulated = false;     ///< whether `seconds` are simulated; they are not if ranks share no links
  std::int64_t variants = 0;  ///< layouts that differ from it only in how state is cut over the data ranks
  double apart = 0;           ///< the largest share by which a variant is slower, by formulas
};

/// The number of layouts that a search keeps for a ranking: a layout has many variants, and slow links change the order
/// much.
inline constexpr std::size_t ranking_pool = 1000;
/// The share by which a variant may be slower.
inline constexpr double variant_share = 0.02;
/// The factor by which formulas may exceed a simulation. A layout that is slower by more is not simulated.
inline constexpr double formula_excess = 1.1;
/// The most work that a ranking simulates, in passes of all microbatches times ranks: a fraction of a second.
inline constexpr double ranking_work = 1e6;
/// The number of layouts that are always simulated, unless a single one is more than `ranking_work`.
inline constexpr std::size_t least_simulated = 3;

/// Whether a simulation on links may differ from the formulas.
constexpr bool shares_links(const training_layout& l) { return l.pp > 1 || l.zero == zero_level::parameters; }

/// Returns the simulated seconds of a step of a layout that shares links, with stragglers in proportion and shared
/// cores.
inline double seconds_on_links(const hardware& h, const training_job& job, const layout_price& p) {
  const double alone = step_on_links(h, job, p) + detail::tied_seconds(h, job, p.layout);
  const step_split& s = p.seconds;
  const double formula = s.total() - s.turns - s.straggling;
  const double seconds = alone * (formula > 0 ? 1 + s.straggling / formula : 1);
  return s.turns > 0 ? std::max(seconds, s.total()) : seconds;
}

namespace detail {

/// Returns a layout with another layout's cuts and copies over the data ranks.
inline training_layout with_data_of(training_layout l, const training_layout& other) {
  l.zero = other.zero, l.replicate = other.replicate, l.dp_copies = other.dp_copies;
  return l;
}

}  // namespace detail

/// Returns the layouts, fastest first, after joining those that differ only in the level of ZeRO and the copies of a
/// hybrid.
inline std::vector<ranked_layout> fold_variants(const std::vector<layout_price>& fastest_first) {
  std::vector<ranked_layout> out;
  for (const layout_price& p : fastest_first) {
    const auto same = std::find_if(out.begin(), out.end(), [&](const ranked_layout& r) {
      return detail::with_data_of(p.layout, r.price.layout) == r.price.layout &&
             p.step() <= (1 + variant_share) * r.price.step();
    });
    if (same == out.end()) {
      out.push_back({p, p.step()});
    } else {
      ++same->variants;
      same->apart = p.step() / same->price.step() - 1;
    }
  }
  return out;
}

namespace detail {

/// Returns the work of simulating a layout, in units of `ranking_work`; 0: it is not simulated.
inline double simulation_work(const training_job& job, const training_layout& l) {
  if (!shares_links(l)) return 0;
  const auto microbatches = static_cast<double>(l.microbatches(job));
  if (l.pp == 1) return microbatches * static_cast<double>(job.model.layers);
  return static_cast<double>(l.stages() * l.pp) * microbatches;
}

/// Whether a layout's schedule has a size that can be simulated.
inline bool can_simulate(const training_job& job, const training_layout& l) {
  return l.pp == 1 || (l.microbatches(job) <= max_microbatches && l.pp <= max_pipeline_ranks);
}

/// Returns the seconds by which a layout is compared with others; nothing if the simulation takes long.
inline std::optional<double> compared_seconds(const hardware& h, const training_job& job, const layout_price& p) {
  const training_layout& l = p.layout;
  if (!shares_links(l)) return p.step();
  if (simulation_work(job, l) > ranking_work / 3 || !can_simulate(job, l)) return std::nullopt;
  return seconds_on_links(h, job, p);
}

}  // namespace detail

/// Returns the `most` best of layouts that are given fastest first by formulas. Layouts are simulated until no other
/// can be among the best, or until `ranking_work` is used up. Layouts without a simulation follow in their order. The
/// time that a simulation adds to the formulas is also added to layouts that differ only in recomputation and context.
inline std::vector<ranked_layout> rank_on_links(const hardware& h, const training_job& job,
                                                const std::vector<ranked_layout>& fastest_first, std::size_t most) {
  std::vector<ranked_layout> best, known, others;  // the `most` best so far; all simulated ones; the rest
  double work = 0;
  bool ended = false;
  for (ranked_layout r : fastest_first) {
    const training_layout& l = r.price.layout;
    const auto alike = std::find_if(known.begin(), known.end(), [&](const ranked_layout& k) {
      training_layout other = detail::with_data_of(l, k.price.layout);
      other.recompute = k.price.layout.recompute, other.context = k.price.layout.context;
      return other == k.price.layout;
    });
    const double factor = alike == known.end() ? 1 / formula_excess : 0.99 * alike->seconds / alike->price.step();
    const bool hopeless = known.size() >= most && factor * r.price.step() > best[most - 1].seconds;
    const double here = detail::simulation_work(job, l);
    if (!hopeless) work += here;
    const bool too_long = known.size() < least_simulated ? here > ranking_work : work > ranking_work;
    ended = ended || too_long || !detail::can_simulate(job, l);
    if (ended || hopeless) {
      others.push_back(std::move(r));
      continue;
    }
    if (shares_links(l)) r.seconds = seconds_on_links(h, job, r.price), r.simulated = true;
    known.push_back(r);
    best.insert(std::upper_bound(best.begin(), best.end(), r,
                                 [](const ranked_layout& a, const ranked_layout& b) { return a.seconds < b.seconds; }),
                r);
  }
  best.insert(best.end(), others.begin(), others.end());
  if (best.size() > most) best.resize(most);
  return best;
}

/// A search with its best layouts in the order of display.
struct ranked_search {
  search_result found;  ///< by formulas; `best` has more layouts than are shown
  std::vector<ranked_layout> ranked;
  std::optional<ranked_layout> fuller;  ///< a better layout that fills more than the share of memory, if any
};

/// Searches, joins variants, and ranks the remaining layouts.
inline ranked_search search_ranked(const hardware& h, const training_job& job, std::int64_t accelerators,
                                   const search_options& options = {}) {
  search_options wide = options;
  wide.most = std::max(ranking_pool, options.most);
  ranked_search out{search_layouts(h, job, accelerators, wide), {}, {}};
  out.ranked = rank_on_links(h, job, fold_variants(out.found.best), options.most);
  if (out.ranked.empty() || !out.found.within_share) return out;
  // The few fastest layouts of the front, whose fastest is last, that fill more memory.
  std::vector<ranked_layout> fuller;
  for (auto p = out.found.front.rbegin(); p != out.found.front.rend() && fuller.size() < 3; ++p)
    if (p->memory.total() > options.memory_share * h.memory) fuller.push_back({*p, p->step()});
  fuller = rank_on_links(h, job, std::move(fuller), 1);
  if (!fuller.empty() && fuller.front().seconds < out.ranked.front().seconds) out.fuller = fuller.front();
  return out;
}

}  // namespace plait::planner
