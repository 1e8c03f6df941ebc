// The fastest layouts of a job on so many accelerators, and those that are best for their memory: all candidates are
// priced, so the search is exact among them. Why one wins is in plan/explain.hpp; a candidate's price:
// plan/step_time.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/plan/step_time.hpp"

namespace plait::planner {

/// How pp and dp lie to each other: whose ranks are neighbours.
enum class axis_orders : std::uint8_t { both, pipeline_outside, pipeline_inside };

/// The choices that candidates are made of. An empty list means every choice that the comments name.
struct search_options {
  std::vector<std::int64_t> tp{}, cp{}, pp{};  ///< divisors of the number of accelerators, tp and cp to 64
  std::vector<std::int64_t> microbatch{};      ///< powers of two up to 64
  std::vector<schedule_kind> schedules{};      ///< 1F1B, interleaved, ZB-H1 and ZB-V
  std::vector<std::int64_t> chunks{};          ///< of interleaved; those with which the largest stage is smaller
  std::vector<plait::recompute> recompute{};   ///< none, selective and full
  std::vector<zero_level> zero{};              ///< levels 0 to 3, the last without a pipeline
  std::vector<replication> replicate{};        ///< none, and over dp, each part of dp, and cp, with levels 1 to 3
  std::vector<context_kind> context{};         ///< ring, gathered keys and values, Ulysses
  axis_orders orders = axis_orders::both;
  bool sequence_parallel = true;  ///< along tp
  std::size_t most = 10;          ///< layouts to return, best first
};

/// The outcome of a search.
struct search_result {
  std::vector<layout_price> best;   ///< that fit, fastest first
  std::vector<layout_price> front;  ///< that fit, each the fastest within its memory, least memory first
  std::int64_t candidates = 0, legal = 0, fitting = 0;
  layout_price smallest;   ///< the legal layout of the least memory, whether or not it fits; meaningful if legal > 0
  layout_refusal nearest;  ///< the refusal of the candidate that passed the most checks, and the first of those
};

namespace detail {

inline std::vector<std::int64_t> divisors_up_to(std::int64_t whole, std::int64_t most) {
  std::vector<std::int64_t> out;
  for (std::int64_t d = 1; d <= std::min(whole, most); ++d)
    if (whole % d == 0) out.push_back(d);
  return out;
}

/// The numbers of chunks with which the largest stage has fewer layers than with any smaller number: others only add
/// messages.
inline std::vector<std::int64_t> useful_chunks(std::int64_t layers, std::int64_t pp) {
  std::vector<std::int64_t> out;
  std::int64_t before = (layers + pp - 1) / pp;
  for (std::int64_t v = 2; v * pp <= layers && v <= max_chunks; ++v) {
    const std::int64_t largest = (layers + v * pp - 1) / (v * pp);
    if (largest < before) out.push_back(v), before = largest;
  }
  return out;
}

/// Collects prices: the fastest, and the front of time and memory.
class price_collector {
 public:
  price_collector(const hardware& h, const training_job& job, const search_options& options, search_result& out)
      : h_(h), job_(job), options_(options), out_(out) {}

  /// Whether a layout is not legal. The result keeps why.
  bool refused(const training_layout& l) {
    layout_refusal here = refusal_of(l, job_);
    if (here.why.empty()) return false;
    if (out_.nearest.why.empty() || here.passed > out_.nearest.passed) out_.nearest = std::move(here);
    return true;
  }

  /// Returns whether the layout is legal and fits. Its passes are those of others before, if `passes` has them.
  bool consider(const training_layout& l, std::optional<passes_price>& passes) {
    ++out_.candidates;
    if (refused(l)) return false;
    ++out_.legal;
    // Memory first: most of what does not fit is never timed.
    const fullest_rank fullest = most_memory(h_, job_, l);
    const double total = fullest.memory.total();
    if (out_.legal == 1 || total < out_.smallest.memory.total()) out_.smallest = price(h_, job_, l);
    if (total > h_.memory) return false;
    ++out_.fitting;
    if (!passes) passes = price_passes(h_, job_, l);
    priced_.push_back(price_around(h_, job_, l, *passes, fullest));
    if (priced_.size() >= 2 * keep_) compact();
    return true;
  }

  void finish() {
    compact();
    out_.front = std::move(front_);
    out_.best = std::move(priced_);
    if (out_.best.size() > options_.most) out_.best.resize(options_.most);
  }

 private:
  static constexpr std::size_t keep_ = 4096;

  /// Keeps the fastest and the front of all so far. Layouts of equal price are in the order of candidates.
  void compact() {
    std::stable_sort(priced_.begin(), priced_.end(),
                     [](const layout_price& a, const layout_price& b) { return a.step() < b.step(); });
    std::vector<layout_price> all = std::move(front_);
    all.insert(all.end(), priced_.begin(), priced_.end());
    std::stable_sort(all.begin(), all.end(), [](const layout_price& a, const layout_price& b) {
      const double x = a.memory.total(), y = b.memory.total();
      return x != y ? x < y : a.step() < b.step();
    });
    front_.clear();
    for (layout_price& p : all)
      if (front_.empty() || p.step() < front_.back().step()) front_.push_back(std::move(p));
    if (priced_.size() > options_.most) priced_.resize(options_.most);
  }

  const hardware& h_;
  const training_job& job_;
  const search_options& options_;
  search_result& out_;
  std::vector<layout_price> priced_{}, front_{};
};

}  // namespace detail

/// Prices every candidate on `accelerators` ranks. A hybrid holds more the more copies of its pieces there are, so that
/// where one does not fit, those with more copies are not tried.
inline search_result search_layouts(const hardware& h, const training_job& job, std::int64_t accelerators,
                                    const search_options& options = {}) {
  search_result out;
  detail::price_collector prices(h, job, options, out);
  const auto choices = [](const auto& given, auto all) { return given.empty() ? all : given; };
  using kinds = std::vector<schedule_kind>;
  const auto schedules = choices(options.schedules, kinds{schedule_kind::one_f_one_b, schedule_kind::interleaved,
                                                          schedule_kind::zb_h1, schedule_kind::zb_v});
  const auto recomputes = choices(
      options.recompute,
      std::vector<plait::recompute>{plait::recompute::none, plait::recompute::selective, plait::recompute::full});
  const auto zeros = choices(options.zero, std::vector<zero_level>{zero_level::optimizer, zero_level::replicated,
                                                                   zero_level::gradients, zero_level::parameters});
  const auto contexts =
      choices(options.context,
              std::vector<context_kind>{context_kind::ring, context_kind::all_gather_kv, context_kind::ulysses});
  const auto hybrids =
      choices(options.replicate, std::vector<replication>{replication::none, replication::over_cp, replication::over_dp,
                                                          replication::over_part_of_dp});
  const auto asked = [&](replication over) { return std::find(hybrids.begin(), hybrids.end(), over) != hybrids.end(); };
  const bool plain = asked(replication::none), over_cp = asked(replication::over_cp);
  const bool over_dp = asked(replication::over_dp), over_parts = asked(replication::over_part_of_dp);
  std::vector<std::int64_t> parts;  // of dp, at the mesh that is looked at
  const auto all_hybrids = [&](training_layout l, std::optional<passes_price>& passes) {
    if (plain && !prices.consider(l, passes)) return;
    const auto with = [&](replication over, std::int64_t copies) {
      l.replicate = over, l.dp_copies = copies;
      return prices.consider(l, passes);
    };
    // Where nothing else is asked for, what is not legal says why.
    const bool cuts = l.zero != zero_level::replicated && job.model.experts == 0;
    const bool two_axes = cuts && l.dp > 1 && l.cp > 1;
    if (over_cp && (two_axes || !plain)) with(replication::over_cp, 1);
    for (std::size_t i = 0; over_parts && cuts && i < parts.size(); ++i)
      if (!with(replication::over_part_of_dp, parts[i])) return;
    if (over_dp && (two_axes || !plain)) with(replication::over_dp, 1);
  };
  std::vector<std::int64_t> powers;
  for (std::int64_t b = 1; b <= 64; b *= 2) powers.push_back(b);
  const auto microbatches = choices(options.microbatch, powers);
  const auto all_policies = [&](training_layout l) {
    // Passes differ by what is recomputed, and, as gradients are added up elsewhere then, by whether those are cut.
    std::optional<passes_price> passes[2][recompute_modes];
    for (const zero_level zero : zeros) {
      if (zero != zero_level::replicated && l.dp * l.cp == 1 && zeros.size() > 1) continue;  // the same as replicated
      if (zero == zero_level::parameters && l.pp > 1) continue;
      l.zero = zero;
      for (const plait::recompute policy : recomputes) {
        l.recompute = policy;
        all_hybrids(l, passes[zero >= zero_level::gradients][static_cast<std::size_t>(policy)]);
      }
    }
  };
  const auto all_schedules = [&](training_layout l) {
    if (l.pp == 1) return all_policies(l);
    for (const schedule_kind kind : schedules) {
      l.schedule = kind;
      l.chunks = kind == schedule_kind::zb_v ? 2 : 1;
      if (kind != schedule_kind::interleaved) {
        if (l.stages() <= job.model.layers) all_policies(l);
        continue;
      }
      if (l.microbatches(job) % l.pp != 0) continue;
      for (const std::int64_t v : choices(options.chunks, detail::useful_chunks(job.model.layers, l.pp))) {
        l.chunks = v;
        all_policies(l);
      }
    }
  };
  const auto both_orders = [&](training_layout l) {
    // Beyond the last level that has units, all places are alike.
    const std::int64_t unit = h.levels.size() > 1 ? h.levels[h.levels.size() - 2].ranks : 1;
    const bool alike = l.pp == 1 || l.dp == 1 || l.tp * l.cp % unit == 0;
    for (const bool inside : {false, true}) {
      if (inside ? alike || options.orders == axis_orders::pipeline_outside
                 : !alike && options.orders == axis_orders::pipeline_inside)
        continue;
      l.pipeline_inside = inside;
      all_schedules(l);
    }
  };
  for (const std::int64_t tp : choices(options.tp, detail::divisors_up_to(accelerators, 64)))
    for (const std::int64_t cp : choices(options.cp, detail::divisors_up_to(accelerators, 64)))
      for (const std::int64_t pp : choices(options.pp, detail::divisors_up_to(accelerators, job.model.layers))) {
        training_layout l;
        l.tp = tp, l.cp = cp, l.pp = pp;
        l.sequence_parallel = options.sequence_parallel;
        if (accelerators % (tp * cp * pp) != 0) continue;
        l.dp = accelerators / (tp * cp * pp);
        parts.clear();
        for (const std::int64_t copies : detail::divisors_up_to(l.dp, l.dp / 2))
          if (copies > 1) parts.push_back(copies);
        const std::int64_t shares = std::gcd(std::max<std::int64_t>(1, job.model.experts), tp * cp * l.dp);
        for (const std::int64_t ep : detail::divisors_up_to(shares, shares))
          for (const std::int64_t b : microbatches) {
            l.ep = ep;
            l.microbatch = b;
            if (b > 1 && job.global_batch % (l.dp * b) != 0) continue;
            for (const context_kind context : contexts) {
              if (cp == 1 && context != contexts.front()) continue;
              l.context = context;
              if (prices.refused(l)) {  // whatever the policies are
                ++out.candidates;
                continue;
              }
              both_orders(l);
            }
          }
      }
  prices.finish();
  return out;
}

}  // namespace plait::planner

#include "plait/core/macros_on.hpp"
