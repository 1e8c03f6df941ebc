// Explains in sentences why a layout is the best and what limits it. Also finds the layout by the rule of thumb, and
// changes to make if nothing fits.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan_llama/planner/parse_layout.hpp"
#include "plan_llama/planner/ranking.hpp"

namespace plait::planner {

namespace detail {

inline std::string rounded(double value, int digits) { return fmt::format("{:.{}f}", value, digits); }

inline std::string gigabytes(double bytes) { return rounded(bytes / 1e9, 1) + " GB"; }

/// Returns the parts of a step other than computing, with their names.
inline std::vector<std::pair<const char*, double>> losses(const step_split& s) {
  return {{"waiting for tensor parallelism", s.tensor},
          {"waiting for context parallelism", s.context},
          {"waiting for tokens of experts", s.experts},
          {"the pipeline's bubble on its busiest rank", s.bubble},
          {"waiting for data parallelism", s.data},
          {"the optimizer", s.optimizer},
          {"waiting for offloaded activations", s.offload},
          {"stragglers", s.straggling},
          {"waiting for shared cores", s.turns},
          {"recomputation", s.recompute}};
}

}  // namespace detail

/// Returns a text on the idle share of a pipeline's time, and whether uneven stages cause it.
inline std::string text_of(const pipeline_balance& b) {
  constexpr double even = 0.01;
  std::string out = cat({"the pipeline's ranks idle ", detail::rounded(100 * b.idle, 1), " % of its time"});
  if (b.uneven >= even)
    out += cat({"; its stages are uneven: rank ", b.busiest, " computes ", detail::rounded(100 * b.uneven, 1),
                " % longer than the mean"});
  return out;
}

/// Returns "93.1 % of the step is computing; the largest loss is waiting for tensor parallelism with 3.0 %, then ...".
inline std::string what_binds(const layout_price& p) {
  auto parts = detail::losses(p.seconds);
  std::stable_sort(parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
  const auto percent = [&](double seconds) { return detail::rounded(100 * seconds / p.step(), 1) + " %"; };
  std::string out = percent(p.seconds.computing() - p.seconds.recompute) + " of the step is computing";
  if (parts[0].second <= 0) return out;
  out += cat({"; the largest loss is ", parts[0].first, " with ", percent(parts[0].second)});
  if (parts[1].second > 0.002 * p.step()) out += cat({", then ", parts[1].first, " with ", percent(parts[1].second)});
  return out;
}

/// The consequence of one change of a layout, as a sentence.
struct alternative {
  std::string change;  ///< "tp=4 instead of 8, dp=16 instead of 8"
  std::string effect;  ///< "needs 95.1 GB and there are 85.5", "3.1 % slower: ...", or why it is not legal
};

namespace detail {

/// Returns the layouts that are one change away from a layout, with texts of the changes: each axis halved and doubled
/// (dp changes to match), other microbatches, recomputation, and no offload, hybrid or special schedule.
inline std::vector<std::pair<std::string, training_layout>> one_step_away(const training_layout& from,
                                                                          const training_job& job) {
  std::vector<std::pair<std::string, training_layout>> out;
  const auto add = [&](std::string change, auto&& make) { make(out.emplace_back(std::move(change), from).second); };
  const auto trade = [&](const char* name, std::int64_t training_layout::*axis, std::int64_t extent, std::int64_t dp) {
    add(cat({name, "=", extent, " and dp=", dp}), [&](training_layout& l) {
      l.*axis = extent, l.dp = dp;
      const bool loses_pipeline = axis == &training_layout::pp && extent == 1;
      if (loses_pipeline) l.schedule = schedule_kind::one_f_one_b, l.chunks = 1;
    });
  };
  const auto resize = [&](const char* name, std::int64_t training_layout::*axis, bool may_grow = true) {
    if (from.*axis % 2 == 0) trade(name, axis, from.*axis / 2, from.dp * 2);
    if (from.dp % 2 == 0 && may_grow) trade(name, axis, from.*axis * 2, from.dp / 2);
  };
  resize("tp", &training_layout::tp);
  resize("cp", &training_layout::cp);
  for (const std::int64_t ep : {from.ep / 2, from.ep * 2})
    if (job.model.experts > 0 && ep >= 1) add(cat({"ep=", ep}), [&](training_layout& l) { l.ep = ep; });
  resize("pp", &training_layout::pp, !schedules_of(job.program).empty());
  for (const std::int64_t b : {from.microbatch / 2, from.microbatch * 2})
    if (b >= 1) add(cat({"microbatch=", b}), [&](training_layout& l) { l.microbatch = b; });
  for (const plait::recompute policy : {plait::recompute::none, plait::recompute::selective, plait::recompute::full})
    if (policy != from.recompute)
      add(cat({"recompute=", plait::name_of(policy)}),
          [&](training_layout& l) { l.recompute = policy, l.recompute_every = 1; });
  if (from.offload_activations || from.offload_optimizer)
    add("offload=none", [](training_layout& l) { l.offload_activations = l.offload_optimizer = false; });
  if (from.replicate != replication::none)
    add("replicate=none", [](training_layout& l) { l.replicate = replication::none, l.dp_copies = 1; });
  if (from.pp > 1 && from.schedule != schedule_kind::one_f_one_b)
    add("schedule=1f1b", [](training_layout& l) { l.schedule = schedule_kind::one_f_one_b, l.chunks = 1; });
  return out;
}

/// Returns the part of a step that grew most, or with `grew` false fell most, as "tensor parallelism (10 to 15 ms)".
inline std::string largest_change(const step_split& before, const step_split& after, bool grew) {
  auto old_parts = losses(before), parts = losses(after);
  old_parts.emplace_back("computing", before.computing() - before.recompute);
  parts.emplace_back("computing", after.computing() - after.recompute);
  std::size_t most = 0;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const double here = parts[i].second - old_parts[i].second, there = parts[most].second - old_parts[most].second;
    if (grew ? here > there : here < there) most = i;
  }
  return cat({parts[most].first, " (", rounded(1e3 * old_parts[most].second, 0), " to ",
              rounded(1e3 * parts[most].second, 0), " ms)"});
}

}  // namespace detail

/// Returns the alternatives that are one change away from a layout. They may fill `memory_share` of the memory. Steps
/// are compared as in the ranking, by simulations of shared links unless these take long.
inline std::vector<alternative> alternatives(const hardware& h, const training_job& job, const layout_price& winner,
                                             double memory_share = usual_memory_share) {
  using detail::gigabytes;
  const double limit = memory_share * h.memory;
  const std::optional<double> winner_seconds = detail::compared_seconds(h, job, winner);
  const auto effect_of = [&](const training_layout& l) {
    if (const std::string why = why_illegal(l, job); !why.empty()) return "is not legal: " + why;
    const layout_price p = price(h, job, l);
    const std::string memory = gigabytes(p.memory.total());
    if (!p.fits) return cat({"needs ", memory, " and there are ", gigabytes(h.memory)});
    if (p.memory.total() > limit)
      return cat({"needs ", memory, ", above the ", gigabytes(limit), " that keep the margin"});
    const double by_formulas = p.step() / winner.step() - 1;
    const std::optional<double> seconds = winner_seconds ? detail::compared_seconds(h, job, p) : std::nullopt;
    const double slower = seconds ? *seconds / *winner_seconds - 1 : by_formulas;
    const std::string percent =
        cat({"is ", detail::rounded(100 * std::abs(slower), 1), " % ", slower >= 0 ? "slower" : "faster"});
    if ((slower >= 0) != (by_formulas >= 0)) return cat({percent, " where links are shared, with ", memory});
    return cat(
        {percent, ", most of it ", detail::largest_change(winner.seconds, p.seconds, slower >= 0), ", with ", memory});
  };
  std::vector<alternative> out;
  for (auto& [change, layout] : detail::one_step_away(winner.layout, job))
    out.push_back({std::move(change), effect_of(layout)});
  return out;
}

/// Returns the layout of the rule of thumb: tensor parallel within a node if one accelerator cannot hold the model's
/// state, then as few stages as fit, then data parallel with the optimizer's state cut, microbatches of one sequence,
/// and as little recomputation as fits. Returns nothing if no such layout is legal and fits.
inline std::optional<layout_price> rule_of_thumb(const hardware& h, const training_job& job,
                                                 std::int64_t accelerators) {
  const std::int64_t node = h.levels.size() > 1 ? std::min(h.levels.front().ranks, accelerators) : 1;
  std::vector<std::int64_t> widths{1};
  if (node > 1) widths.push_back(node);
  for (const std::int64_t tp : widths)
    for (const std::int64_t pp : detail::divisors_up_to(accelerators, tp == 1 ? 1 : job.model.layers))
      for (const plait::recompute policy :
           {plait::recompute::none, plait::recompute::selective, plait::recompute::full}) {
        training_layout l;
        l.tp = tp, l.pp = pp, l.recompute = policy, l.folds_experts = job.program.folds_experts;
        if (accelerators % (tp * pp) != 0) continue;
        l.dp = accelerators / (tp * pp);
        if (!why_illegal(l, job).empty()) continue;
        layout_price p = price(h, job, l);
        if (p.fits) return p;
      }
  return std::nullopt;
}

namespace detail {

/// Returns the sizes that have no common divisor above 1 with the accelerators, so that their axis stays 1; empty:
/// none.
inline std::string undivided(const training_job& job, std::int64_t accelerators) {
  std::string out;
  if (accelerators < 2) return out;
  const auto add = [&](const char* name, std::int64_t size, const char* effect, std::int64_t pieces) {
    if (size < 2 || std::gcd(size, accelerators) > 1) return;
    out += cat({"; ", name, " is ", size, ", which has no divisor in common with the ", accelerators,
                " accelerators, so that ", effect});
    if (pieces > 0)
      out += cat({"; the nearest that can be cut are ", std::max<std::int64_t>(1, size / pieces) * pieces, " and ",
                  (size / pieces + 1) * pieces});
  };
  add("seq", job.seq, "cp and tp cannot cut it", 2 * std::min<std::int64_t>(accelerators, 64));
  add("batch", job.global_batch, "dp is 1", accelerators);
  add("heads", job.model.heads, "tp is 1", 0);
  if (!(job.model.experts > 0 && job.program.folds_experts)) add("ffn", job.model.ffn, "tp is 1", 0);
  return out;
}

}  // namespace detail

/// Returns why a search found nothing, and what would help. If layouts are legal, it names by how much the smallest is
/// too large, and a number of accelerators with which one fits. Otherwise it is the refusal of the nearest candidate.
inline std::string why_nothing(const hardware& h, const training_job& job, std::int64_t accelerators,
                               const search_result& found, const search_options& options = {}) {
  if (found.legal == 0) return cat({"no layout of ", accelerators, " accelerators is legal: ", found.nearest.why});
  const memory_split& m = found.smallest.memory;
  std::string out =
      cat({"no layout fits: the smallest, ", layout_text(found.smallest.layout), ", needs ",
           detail::gigabytes(m.total()), " on a rank, ", detail::gigabytes(m.total() - h.memory), " more than a ",
           h.name, " has; of that, ", detail::gigabytes(m.state()), " are weights, gradients and optimizer, ",
           detail::gigabytes(m.activations), " activations, ", detail::gigabytes(m.logits), " logits"});
  search_options wider = options;
  wider.most = 1;
  for (std::int64_t n = 2 * accelerators; n <= 64 * accelerators; n *= 2) {
    const search_result more = search_layouts(h, job, n, wider);
    if (!more.best.empty())
      return out + cat({"; ", n, " accelerators would do, as in ", layout_text(more.best.front().layout)});
    if (more.legal == 0) break;
  }
  if (const std::string sizes = detail::undivided(job, accelerators); !sizes.empty()) return out + sizes;
  return out + "; more accelerators of this kind do not help: use a shorter sequence, a smaller model or more memory";
}

/// Returns by how much a layout is too large, and what would make it fit: one change, or the fastest layout that fits
/// on the same number of accelerators, or more accelerators.
inline std::string why_too_large(const hardware& h, const training_job& job, const layout_price& p) {
  const memory_split& m = p.memory;
  std::string out = cat({"it does not fit: rank ", p.fullest, " of the pipeline needs ", detail::gigabytes(m.total()),
                         ", ", detail::gigabytes(m.total() - h.memory), " more than a ", h.name, " has"});
  const training_layout& l = p.layout;
  std::optional<layout_price> best;
  std::string change;
  const auto consider = [&](const std::string& text, auto&& make) {
    training_layout other = l;
    make(other);
    if (!why_illegal(other, job).empty()) return;
    const layout_price here = price(h, job, other);
    if (here.fits && (!best || here.step() < best->step())) best = here, change = text;
  };
  for (const plait::recompute policy : {plait::recompute::selective, plait::recompute::full})
    if (policy != l.recompute)
      consider(cat({"recompute=", plait::name_of(policy)}),
               [&](training_layout& to) { to.recompute = policy, to.recompute_every = 1; });
  for (const zero_level level : {zero_level::optimizer, zero_level::gradients, zero_level::parameters})
    if (level != l.zero && l.dp * l.cp > 1)
      consider(cat({"zero=", static_cast<int>(level)}), [&](training_layout& to) { to.zero = level; });
  for (std::int64_t b = l.microbatch / 2; b >= 1; b /= 2)
    consider(cat({"microbatch=", b}), [&](training_layout& to) { to.microbatch = b; });
  if (best)
    return out +
           cat({"; with ", change, " it would, in ", detail::rounded(best->step() / p.step(), 2), " times its time"});
  const search_result found = search_layouts(h, job, l.ranks(), {.most = 1});
  if (!found.best.empty())
    return out + cat({"; the fastest that fits is ", layout_text(found.best.front().layout), ", in ",
                      detail::rounded(found.best.front().step() / p.step(), 2), " times its time"});
  return out + "; " + why_nothing(h, job, l.ranks(), found);
}

}  // namespace plait::planner
