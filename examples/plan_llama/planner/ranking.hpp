// The order of a search's layouts as it is shown: variants of one layout are one, and the fastest by formulas are
// simulated on the links that their ranks share, where slow networks change the order. The search: search.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "plan_llama/planner/search.hpp"
#include "plan_llama/planner/step_on_links.hpp"

namespace plait::planner {

/// A layout with the seconds by which it is ranked, and the variants that it stands for.
struct ranked_layout {
  layout_price price;
  double seconds = 0;         ///< of a step, simulated on shared links or by formulas
  bool simulated = false;     ///< which of both; formulas are all there is where ranks share no links
  std::int64_t variants = 0;  ///< layouts that differ from it in what is cut over the data ranks alone
  double apart = 0;           ///< the largest share by which one of those is slower, by formulas
};

/// How many layouts a search keeps for a ranking: variants of one are many, and slow links change the order widely.
inline constexpr std::size_t ranking_pool = 1000;
/// By how much a layout may be slower than another for its variant.
inline constexpr double variant_share = 0.02;
/// How far formulas may be above a simulation: a layout that is slower by more is not simulated.
inline constexpr double formula_excess = 1.1;
/// A ranking simulates so much at most, in passes of all microbatches times ranks: a fraction of a second.
inline constexpr double ranking_work = 1e6;
/// The layouts that are simulated whatever work that is, unless one is more than `ranking_work` alone.
inline constexpr std::size_t least_simulated = 3;

/// Whether a simulation on links has more to say of a layout than formulas.
constexpr bool shares_links(const training_layout& l) { return l.pp > 1 || l.zero == zero_level::parameters; }

/// Seconds of a step of a layout that shares links, simulated, with stragglers in proportion and shared cores.
inline double seconds_on_links(const hardware& h, const training_job& job, const layout_price& p) {
  const double alone = step_on_links(h, job, p) + detail::tied_seconds(h, job, p.layout);
  const step_split& s = p.seconds;
  const double formula = s.total() - s.turns - s.straggling;
  const double seconds = alone * (formula > 0 ? 1 + s.straggling / formula : 1);
  return s.turns > 0 ? std::max(seconds, s.total()) : seconds;
}

namespace detail {

/// A layout that cuts and copies over the data ranks what another one does.
inline training_layout with_data_of(training_layout l, const training_layout& other) {
  l.zero = other.zero, l.replicate = other.replicate, l.dp_copies = other.dp_copies;
  return l;
}

}  // namespace detail

/// Layouts, fastest first, with those that differ in the level of ZeRO and the copies of a hybrid alone as one.
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

/// The work of simulating a layout, as `ranking_work` counts it; 0: formulas are all there is.
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

/// The seconds of a layout by which it is compared with others; nothing where the simulation takes long.
inline std::optional<double> compared_seconds(const hardware& h, const training_job& job, const layout_price& p) {
  const training_layout& l = p.layout;
  if (!shares_links(l)) return p.step();
  if (simulation_work(job, l) > ranking_work / 3 || !can_simulate(job, l)) return std::nullopt;
  return seconds_on_links(h, job, p);
}

}  // namespace detail

/// The `most` best of layouts that are given fastest first by formulas. They are simulated until no other can be among
/// the best or `ranking_work` is used up; those that are not simulated follow in their order. What a simulation adds to
/// the formulas is expected of layouts that differ in recomputation and context alone, too.
inline std::vector<ranked_layout> rank_on_links(const hardware& h, const training_job& job,
                                                const std::vector<ranked_layout>& fastest_first, std::size_t most) {
  std::vector<ranked_layout> best, known, others;  // the `most` best so far; all with their seconds; the rest
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

/// A search with its best layouts in the order to show.
struct ranked_search {
  search_result found;  ///< by formulas; `best` has more than are asked for
  std::vector<ranked_layout> ranked;
  std::optional<ranked_layout> fuller;  ///< the layout that fills more than the share of memory and would come first
};

/// Searches, folds variants, and ranks what is left.
inline ranked_search search_ranked(const hardware& h, const training_job& job, std::int64_t accelerators,
                                   const search_options& options = {}) {
  search_options wide = options;
  wide.most = std::max(ranking_pool, options.most);
  ranked_search out{search_layouts(h, job, accelerators, wide), {}, {}};
  out.ranked = rank_on_links(h, job, fold_variants(out.found.best), options.most);
  if (out.ranked.empty() || !out.found.within_share) return out;
  // Of the front, which has the fastest last, the few fastest that fill more.
  std::vector<ranked_layout> fuller;
  for (auto p = out.found.front.rbegin(); p != out.found.front.rend() && fuller.size() < 3; ++p)
    if (p->memory.total() > options.memory_share * h.memory) fuller.push_back({*p, p->step()});
  fuller = rank_on_links(h, job, std::move(fuller), 1);
  if (!fuller.empty() && fuller.front().seconds < out.ranked.front().seconds) out.fuller = fuller.front();
  return out;
}

}  // namespace plait::planner
