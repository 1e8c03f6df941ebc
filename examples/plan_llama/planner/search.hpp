// Searches the fastest layouts of a job on a number of accelerators, and the fastest for each amount of memory. All
// candidates are priced, so the search is exact among them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "plan_llama/planner/software_table.hpp"
#include "plan_llama/planner/step_time.hpp"

namespace plait::planner {

/// The order of the axes pp and dp: which of them has neighbouring ranks.
enum class axis_orders : std::uint8_t { both, pipeline_outside, pipeline_inside };

/// The share of a device's memory that a search fills. Predicted peaks are wrong by 7 to 13 per cent at worst, and a
/// layout with less of the memory costs about two per cent of the time.
inline constexpr double usual_memory_share = 0.92;

/// The state that a layout keeps in host memory.
struct offload_choice {
  bool activations = false, optimizer = false;

  friend bool operator==(const offload_choice&, const offload_choice&) = default;
};

/// The most layouts with offload that a search prices, and the most work that it simulates for their copies, in passes
/// of a unit: a fraction of a second. Layouts with the shortest passes come first.
inline constexpr std::size_t most_offloaded = 256;
inline constexpr double offload_work = 3e5;

/// The choices from which candidates are made. An empty list means all choices in its comment.
struct search_options {
  std::vector<std::int64_t> tp{}, cp{}, pp{};  ///< divisors of the number of accelerators, tp and cp to 64
  std::vector<std::int64_t> ep{};              ///< numbers of a layout's ranks that divide the experts
  std::vector<std::int64_t> microbatch{};      ///< powers of two up to 64
  std::vector<schedule_kind> schedules{};      ///< 1F1B, interleaved, ZB-H1 and ZB-V, if the program has them
  std::vector<std::int64_t> chunks{};          ///< of interleaved; numbers that make the largest stage smaller
  std::vector<plait::recompute> recompute{};   ///< none, selective and full
  std::vector<zero_level> zero{};              ///< levels 0 to 3, the last without a pipeline
  std::vector<replication> replicate{};        ///< none, and over dp, each part of dp, and cp, with levels 1 to 3
  std::vector<context_kind> context{};         ///< ring, gathered keys and values, Ulysses
  /// None, the optimizer, activations and both, if the machine and the program can. A layout that fits without offload
  /// is never faster with it. So a layout with offload is then no candidate, unless all given choices offload.
  std::vector<offload_choice> offload{};
  axis_orders orders = axis_orders::both;
  bool sequence_parallel = true;             ///< along tp
  std::int64_t loss_chunks = 1;              ///< of every candidate
  double memory_share = usual_memory_share;  ///< largest share of a device's memory to fill; above 0, at most 1
  std::size_t most = 10;                     ///< layouts to return, best first
};

/// The outcome of a search.
struct search_result {
  std::vector<layout_price> best;   ///< within the share of memory, fastest first; from `front` if there are none
  std::vector<layout_price> front;  ///< layouts that fit, each the fastest within its memory, least memory first
  bool within_share = true;         ///< whether `best` is within the share of memory
  /// Numbers of layouts without offload. If all given choices offload, `fitting` counts the priced ones.
  std::int64_t candidates = 0, legal = 0, fitting = 0;
  layout_price smallest;   ///< the legal layout with the least memory, even if it does not fit; valid if legal > 0
  layout_refusal nearest;  ///< the refusal of the first candidate of those that passed the most checks
};

namespace detail {

/// Returns the schedules of a search if none is given.
inline std::vector<schedule_kind> searched_schedules(const software& program) {
  std::vector<schedule_kind> out = schedules_of(program);
  std::erase_if(out, [](schedule_kind kind) {
    return kind == schedule_kind::gpipe || kind == schedule_kind::zb_h2 || kind == schedule_kind::automatic;
  });
  return out;
}

inline std::vector<std::int64_t> divisors_up_to(std::int64_t whole, std::int64_t most) {
  std::vector<std::int64_t> out;
  for (std::int64_t d = 1; d <= std::min(whole, most); ++d)
    if (whole % d == 0) out.push_back(d);
  return out;
}

/// Returns the numbers of chunks with which the largest stage has fewer layers than with any smaller number. Other
/// numbers only add messages.
inline std::vector<std::int64_t> useful_chunks(std::int64_t layers, std::int64_t pp) {
  std::vector<std::int64_t> out;
  std::int64_t before = (layers + pp - 1) / pp;
  for (std::int64_t v = 2; v * pp <= layers && v <= max_chunks; ++v) {
    const std::int64_t largest = (layers + v * pp - 1) / (v * pp);
    if (largest < before) out.push_back(v), before = largest;
  }
  return out;
}

/// The part of a price that is equal for layouts which differ only in how state is cut over the data ranks: the memory
/// and the times of passes. There are two times, because gradients may be added up in another place if they are cut.
struct shared_price {
  std::optional<pipeline_loads> loads{};
  std::optional<passes_price> passes[2]{};
};

/// Returns the offload choices of a search if none is given.
inline std::vector<offload_choice> searched_offload(const hardware& h, const software& program) {
  if (!program.offloads || h.host_bandwidth <= 0) return {{}};
  return {{}, {false, true}, {true, false}, {true, true}};
}

/// A layout with offload, and the least seconds that it can take.
struct offloaded_layout {
  training_layout layout;
  double seconds = 0;
};

/// Collects prices: the fastest layouts, and the front of time and memory.
class price_collector {
 public:
  price_collector(const hardware& h, const training_job& job, const search_options& options, search_result& out)
      : h_(h),
        job_(job),
        options_(options),
        out_(out),
        offload_(options.offload.empty() ? searched_offload(h, job.program) : options.offload) {}

  /// Returns whether a layout is not legal, and records why.
  bool refused(const training_layout& l) {
    layout_refusal here = refusal_of(l, job_);
    if (here.why.empty()) return false;
    keep_refusal(std::move(here));
    return true;
  }

  /// Records why a layout is no candidate, if no reason is recorded yet: perhaps no candidate follows.
  void record_refusal(const training_layout& l) {
    if (out_.nearest.why.empty() && out_.legal == 0) out_.nearest = refusal_of(l, job_);
  }
  /// Records that the program has no pipeline, if no reason is recorded yet.
  void lacks_pipeline(const training_layout& l) {
    if (out_.nearest.why.empty())
      out_.nearest = {-1,
                      cat({"pp is ", l.pp, " and the program ", job_.program.name, " has no pipeline; legal is 1"})};
  }
  /// Records that the product of extents does not divide the accelerators, if no reason is recorded yet.
  void record_refusal(const training_layout& l, std::int64_t accelerators) {
    if (out_.nearest.why.empty())
      out_.nearest = {-1, cat({"tp = ", l.tp, ", cp = ", l.cp, " and pp = ", l.pp, " are ", l.tp * l.cp * l.pp,
                               " ranks, which must divide the ", accelerators, "; the nearest are ",
                               nearest_divisors(accelerators, l.tp * l.cp * l.pp)})};
  }

  /// Prices a layout whose mesh and schedule are legal. Returns whether it is legal and fits, or may fit with offload.
  /// `shared` has the passes and the kept memory of layouts that differ only in their cuts.
  bool consider(const training_layout& l, const stage_times& times, shared_price& shared) {
    ++out_.candidates;
    if (layout_refusal here = refusal_of_data(l, job_); !here.why.empty()) return keep_refusal(std::move(here)), false;
    ++out_.legal;
    // Memory comes first: most layouts that do not fit need no times.
    if (!shared.loads) shared.loads.emplace(job_, l);
    const fullest_rank fullest = most_memory(h_, job_, l, *shared.loads);
    const double total = fullest.memory.total();
    if (out_.legal == 1 || total < out_.smallest.memory.total()) out_.smallest = price(h_, job_, l);
    const bool stays = all_stays();
    bool may_fit = false;
    if (!stays || total > options_.memory_share * h_.memory) may_fit = offload(l, times, shared, fullest.memory);
    if (!stays || total > h_.memory) return may_fit;
    ++out_.fitting;
    // A step takes at least as long as its passes.
    const passes_price& passes = passes_of(l, times, shared);
    if (!useless(passes.seconds.total(), total)) keep(price_around(h_, job_, l, passes, fullest));
    return true;
  }

  void finish() {
    compact();
    price_offloaded();
    compact();
    out_.within_share = !priced_.empty() || front_.empty();
    out_.best = out_.within_share ? std::move(priced_) : std::vector<layout_price>(front_.rbegin(), front_.rend());
    out_.front = std::move(front_);
    if (out_.best.size() > options_.most) out_.best.resize(options_.most);
  }

 private:
  static constexpr std::size_t keep_ = 128;

  /// Whether layouts that offload nothing are candidates.
  bool all_stays() const { return std::find(offload_.begin(), offload_.end(), offload_choice{}) != offload_.end(); }
  const passes_price& passes_of(const training_layout& l, const stage_times& times, shared_price& shared) {
    std::optional<passes_price>& passes = shared.passes[l.zero >= zero_level::gradients];
    if (!passes) passes = price_passes(h_, job_, l, times);
    return *passes;
  }
  void keep(layout_price p) {
    const double total = p.memory.total();
    if (useless(p.step(), total)) return;
    (total > options_.memory_share * h_.memory ? fuller_ : priced_).push_back(std::move(p));
    if ((priced_.size() + fuller_.size()) / 2 >= std::max(keep_, options_.most)) compact();
  }

  /// Stores the layout's offload choices that may fit, for `price_offloaded`. Returns whether there are any.
  bool offload(const training_layout& l, const stage_times& times, shared_price& shared, const memory_split& memory) {
    bool may_fit = false;
    for (const offload_choice& choice : offload_) {
      offloaded_layout one{l};
      one.layout.offload_activations = choice.activations, one.layout.offload_optimizer = choice.optimizer;
      const double leaves = (choice.activations ? memory.activations : 0) + (choice.optimizer ? memory.optimizer : 0);
      if (leaves == 0 || memory.total() - (1 + h_.fragmentation) * leaves > options_.memory_share * h_.memory) continue;
      if (!why_no_offload(one.layout, job_).empty()) continue;
      may_fit = true;
      one.seconds = passes_of(l, times, shared).seconds.total();
      offloaded_.push_back(one);
    }
    if (offloaded_.size() >= 2 * most_offloaded + offload_.size()) keep_fastest_offloaded();
    return may_fit;
  }
  void keep_fastest_offloaded() {
    std::stable_sort(offloaded_.begin(), offloaded_.end(),
                     [](const offloaded_layout& a, const offloaded_layout& b) { return a.seconds < b.seconds; });
    if (offloaded_.size() > most_offloaded) offloaded_.resize(most_offloaded);
  }
  /// Prices the stored layouts. Cuts over the data ranks change neither copies nor the memory of passes.
  void price_offloaded() {
    keep_fastest_offloaded();
    std::vector<std::pair<training_layout, shared_price>> known;
    double work = 0;
    for (const auto& [l, seconds] : offloaded_) {
      if (seconds >= slowest_) break;
      training_layout alike = l;
      alike.zero = zero_level::replicated, alike.replicate = replication::none, alike.dp_copies = 1;
      alike.offload_optimizer = false;
      auto same = std::find_if(known.begin(), known.end(), [&](const auto& k) { return k.first == alike; });
      if (same == known.end()) {
        if (l.offload_activations) work += static_cast<double>(l.microbatches(job_) * (job_.model.layers + 2));
        if (l.offload_activations && work > offload_work && !known.empty()) continue;
        known.emplace_back(alike, shared_price{});
        same = std::prev(known.end());
      }
      shared_price& shared = same->second;
      if (!shared.loads) shared.loads.emplace(job_, l);
      const fullest_rank fullest = most_memory(h_, job_, l, *shared.loads);
      if (fullest.memory.total() > h_.memory || fullest.memory.host > h_.host_memory) continue;
      if (!all_stays()) ++out_.fitting;
      keep(price_around(h_, job_, l, passes_of(l, stage_times(h_, job_, l), shared), fullest));
    }
  }

  void keep_refusal(layout_refusal here) {
    if (out_.nearest.why.empty() || here.passed > out_.nearest.passed) out_.nearest = std::move(here);
  }

  /// Whether a layout that takes at least `seconds` is neither among the fastest nor on the front. An equal layout that
  /// came before it stays.
  bool useless(double seconds, double bytes) const {
    if (seconds < slowest_ && bytes <= options_.memory_share * h_.memory) return false;
    const auto above = std::upper_bound(front_.begin(), front_.end(), bytes,
                                        [](double b, const layout_price& p) { return b < p.memory.total(); });
    return above != front_.begin() && std::prev(above)->step() <= seconds;
  }

  /// Keeps only the fastest layouts and the front. Layouts of equal price are in the order of candidates.
  void compact() {
    std::stable_sort(priced_.begin(), priced_.end(),
                     [](const layout_price& a, const layout_price& b) { return a.step() < b.step(); });
    std::vector<layout_price> all = std::move(front_);
    all.insert(all.end(), priced_.begin(), priced_.end());
    all.insert(all.end(), fuller_.begin(), fuller_.end());
    fuller_.clear();
    std::stable_sort(all.begin(), all.end(), [](const layout_price& a, const layout_price& b) {
      const double x = a.memory.total(), y = b.memory.total();
      return x != y ? x < y : a.step() < b.step();
    });
    front_.clear();
    for (layout_price& p : all)
      if (front_.empty() || p.step() < front_.back().step()) front_.push_back(std::move(p));
    if (priced_.size() < options_.most) return;
    priced_.resize(options_.most);
    slowest_ = priced_.empty() ? 0 : priced_.back().step();
  }

  const hardware& h_;
  const training_job& job_;
  const search_options& options_;
  search_result& out_;
  std::vector<layout_price> priced_{}, front_{};
  std::vector<offload_choice> offload_;
  std::vector<offloaded_layout> offloaded_{};
  std::vector<layout_price> fuller_{};                        ///< that fit and fill more than the share of memory
  double slowest_ = std::numeric_limits<double>::infinity();  ///< seconds of the slowest of the fastest layouts
};

}  // namespace detail

/// Prices every candidate on `accelerators` ranks. A hybrid with more copies of its pieces needs more memory. So if one
/// does not fit, hybrids with more copies are not tried.
inline search_result search_layouts(const hardware& h, const training_job& job, std::int64_t accelerators,
                                    const search_options& options = {}) {
  search_result out;
  if (!(options.memory_share > 0 && options.memory_share <= 1))
    fail({"memory_share is ", options.memory_share, "; legal is a share above 0, at most 1"});
  if (const std::string why = why_lacking(job.program, options.schedules); !why.empty()) fail(why);
  for (const offload_choice& choice : options.offload) {
    training_layout l;
    l.offload_activations = choice.activations, l.offload_optimizer = choice.optimizer;
    if (const std::string why = why_no_host_link(h, l); !why.empty()) fail(why);
    if (const std::string why = detail::why_no_offload(l, job); !why.empty() && !job.program.offloads) fail(why);
  }
  detail::price_collector prices(h, job, options, out);
  const auto choices = [](const auto& given, auto all) { return given.empty() ? all : given; };
  const auto schedules = choices(options.schedules, detail::searched_schedules(job.program));
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
  std::vector<std::int64_t> parts;  // parts of dp, in the present mesh
  const auto all_hybrids = [&](training_layout l, const stage_times& times, detail::shared_price& shared) {
    if (plain && !prices.consider(l, times, shared)) return;
    const auto with = [&](replication over, std::int64_t copies) {
      l.replicate = over, l.dp_copies = copies;
      return prices.consider(l, times, shared);
    };
    // If no other choice is given, a refusal is recorded.
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
  // A stage's passes depend neither on the number of stages nor on the schedule.
  std::map<std::tuple<std::int64_t, std::int64_t, context_kind, plait::recompute, bool>, stage_times> times;
  const auto times_of = [&](const training_layout& l) -> const stage_times& {
    const std::tuple key(l.ep, l.microbatch, l.context, l.recompute, l.ep > 1 && l.pipeline_inside);
    const auto known = times.find(key);
    return known != times.end() ? known->second : times.emplace(key, stage_times(h, job, l)).first->second;
  };
  const zero_level least_cut = *std::min_element(zeros.begin(), zeros.end());
  const auto all_policies = [&](training_layout l) {
    if (prices.refused(l)) {
      ++out.candidates;
      return;
    }
    detail::shared_price shared[recompute_modes];
    for (const zero_level zero : zeros) {
      if (l.dp * l.cp == 1 && zero != least_cut) continue;  // nothing is cut: all levels are equal
      l.zero = zero;
      if (zero == zero_level::parameters && l.pp > 1) {
        prices.record_refusal(l);
        continue;
      }
      for (const plait::recompute policy : recomputes) {
        l.recompute = policy;
        all_hybrids(l, times_of(l), shared[static_cast<std::size_t>(policy)]);
      }
    }
  };
  const auto all_schedules = [&](training_layout l) {
    if (l.pp == 1) return all_policies(l);
    if (schedules.empty()) prices.lacks_pipeline(l);
    for (const schedule_kind kind : schedules) {
      l.schedule = kind;
      l.chunks = kind == schedule_kind::zb_v ? 2 : 1;
      if (kind != schedule_kind::interleaved) {
        if (l.stages() <= job.model.layers)
          all_policies(l);
        else
          prices.record_refusal(l);
        continue;
      }
      l.chunks = 2;
      if (l.microbatches(job) % l.pp != 0 || l.stages() > job.model.layers) {
        prices.record_refusal(l);
        continue;
      }
      for (const std::int64_t v : choices(options.chunks, detail::useful_chunks(job.model.layers, l.pp))) {
        l.chunks = v;
        all_policies(l);
      }
    }
  };
  const auto both_orders = [&](training_layout l) {
    // Beyond the last level that has units, all places are equal.
    const std::int64_t unit = h.levels.size() > 1 ? h.levels[h.levels.size() - 2].ranks : 1;
    const bool alike = l.pp == 1 || l.dp == l.near_dp() || l.tp * l.cp * l.near_dp() % unit == 0;
    for (const bool inside : {false, true}) {
      if (inside ? alike || options.orders == axis_orders::pipeline_outside
                 : !alike && options.orders == axis_orders::pipeline_inside)
        continue;
      l.pipeline_inside = inside;
      all_schedules(l);
    }
  };
  for (const std::int64_t tp : choices(options.tp, detail::divisors_up_to(accelerators, 64)))
    for (const std::int64_t cp : choices(options.cp, detail::divisors_up_to(accelerators, 64))) {
      times.clear();
      for (const std::int64_t pp : choices(options.pp, detail::divisors_up_to(accelerators, job.model.layers))) {
        training_layout l;
        l.tp = tp, l.cp = cp, l.pp = pp;
        l.sequence_parallel = options.sequence_parallel, l.folds_experts = job.program.folds_experts;
        l.loss_chunks = options.loss_chunks;
        if (accelerators % (tp * cp * pp) != 0) {
          prices.record_refusal(l, accelerators);
          continue;
        }
        l.dp = accelerators / (tp * cp * pp);
        parts.clear();
        for (const std::int64_t copies : detail::divisors_up_to(l.dp, l.dp / 2))
          if (copies > 1) parts.push_back(copies);
        const std::int64_t shares = legal_expert_ranks(l, job.model);
        for (const std::int64_t ep : choices(options.ep, detail::divisors_up_to(shares, shares)))
          for (const std::int64_t b : microbatches) {
            l.ep = ep;
            l.microbatch = b;
            if (b > 1 && job.global_batch % (l.dp * b) != 0) {
              prices.record_refusal(l);
              continue;
            }
            for (const context_kind context : contexts) {
              if (cp == 1 && context != contexts.front()) continue;
              l.context = context;
              if (prices.refused(l)) {  // under every policy
                ++out.candidates;
                continue;
              }
              both_orders(l);
            }
          }
      }
    }
  prices.finish();
  return out;
}

}  // namespace plait::planner
