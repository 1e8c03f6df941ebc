// Why a layout wins and what binds it, in sentences; the rule of thumb beside it; and what to change where nothing
// fits. The search itself is in search.hpp.
#pragma once

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

inline std::string rounded(double value, int digits) {
  double scale = 1;
  for (int i = 0; i < digits; ++i) scale *= 10;
  const auto units = static_cast<std::int64_t>(value * scale + (value < 0 ? -0.5 : 0.5));
  std::string text = std::to_string(units < 0 ? -units : units);
  if (digits > 0) {
    while (text.size() <= static_cast<std::size_t>(digits)) text.insert(text.begin(), '0');
    text.insert(text.end() - digits, '.');
  }
  return (units < 0 ? "-" : "") + text;
}

inline std::string gigabytes(double bytes) { return rounded(bytes / 1e9, 1) + " GB"; }

/// The parts of a step that are not computing, with their names.
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

/// The part of a pipeline's time in which its ranks idle, and whether that is because their stages are uneven.
inline std::string text_of(const pipeline_balance& b) {
  constexpr double even = 0.01;
  std::string out = cat({"the pipeline's ranks idle ", detail::rounded(100 * b.idle, 1), " % of its time"});
  if (b.uneven >= even)
    out += cat({"; its stages are uneven: rank ", b.busiest, " computes ", detail::rounded(100 * b.uneven, 1),
                " % longer than the mean"});
  return out;
}

/// "93.1 % of the step is computing; the largest loss is waiting for tensor parallelism with 3.0 %, then ..."
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

/// The alternatives one step away from a layout: each axis halved and doubled (dp, or pp, gives and takes), other
/// schedules, microbatches, recomputation and data-parallel policies. They may fill `memory_share` of the memory. Steps
/// are compared as they are ranked, with shared links simulated, unless that takes long.
inline std::vector<alternative> alternatives(const hardware& h, const training_job& job, const layout_price& winner,
                                             double memory_share = usual_memory_share) {
  std::vector<alternative> out;
  const double limit = memory_share * h.memory;
  const std::optional<double> winner_seconds = detail::compared_seconds(h, job, winner);
  const auto consider = [&](std::string change, const training_layout& l) {
    alternative a{std::move(change), {}};
    if (std::string why = why_illegal(l, job); !why.empty()) {
      a.effect = "is not legal: " + why;
    } else {
      const layout_price p = price(h, job, l);
      const double by_formulas = p.step() / winner.step() - 1;
      double slower = by_formulas;
      if (p.fits && p.memory.total() <= limit && winner_seconds)
        if (const std::optional<double> seconds = detail::compared_seconds(h, job, p); seconds)
          slower = *seconds / *winner_seconds - 1;
      const std::string percent =
          cat({"is ", detail::rounded(100 * std::abs(slower), 1), " % ", slower >= 0 ? "slower" : "faster"});
      if (!p.fits) {
        a.effect = cat({"needs ", detail::gigabytes(p.memory.total()), " and there are ", detail::gigabytes(h.memory)});
      } else if (p.memory.total() > limit) {
        a.effect = cat({"needs ", detail::gigabytes(p.memory.total()), ", above the ", detail::gigabytes(limit),
                        " that keep the margin"});
      } else if ((slower >= 0) != (by_formulas >= 0)) {
        a.effect = cat({percent, " where links are shared, with ", detail::gigabytes(p.memory.total())});
      } else {
        // The part that grew most, or where it is faster, fell most.
        auto before = detail::losses(winner.seconds), after = detail::losses(p.seconds);
        before.emplace_back("computing", winner.seconds.computing() - winner.seconds.recompute);
        after.emplace_back("computing", p.seconds.computing() - p.seconds.recompute);
        std::size_t most = 0;
        for (std::size_t i = 1; i < after.size(); ++i) {
          const double change_here = after[i].second - before[i].second;
          const double change_most = after[most].second - before[most].second;
          if (slower >= 0 ? change_here > change_most : change_here < change_most) most = i;
        }
        a.effect = cat(
            {percent, ", most of it ", after[most].first, " (", detail::rounded(1e3 * before[most].second, 0), " to ",
             detail::rounded(1e3 * after[most].second, 0), " ms), with ", detail::gigabytes(p.memory.total())});
      }
    }
    out.push_back(std::move(a));
  };
  const training_layout& w = winner.layout;
  const auto trade = [&](const char* name, std::int64_t training_layout::*axis) {
    if (w.*axis % 2 == 0) {
      training_layout l = w;
      l.*axis /= 2, l.dp *= 2;
      consider(cat({name, "=", l.*axis, " and dp=", l.dp}), l);
    }
    if (w.dp % 2 == 0) {
      training_layout l = w;
      l.*axis *= 2, l.dp /= 2;
      consider(cat({name, "=", l.*axis, " and dp=", l.dp}), l);
    }
  };
  trade("tp", &training_layout::tp);
  trade("cp", &training_layout::cp);
  if (job.model.experts > 0)
    for (const std::int64_t ep : {w.ep / 2, w.ep * 2})
      if (ep >= 1) {
        training_layout l = w;
        l.ep = ep;
        consider(cat({"ep=", ep}), l);
      }
  const auto repaired = [&](training_layout l) {  // a pipeline of one has no schedule
    if (l.pp == 1) l.schedule = schedule_kind::one_f_one_b, l.chunks = 1;
    return l;
  };
  if (w.pp % 2 == 0) {
    training_layout l = w;
    l.pp /= 2, l.dp *= 2;
    consider(cat({"pp=", l.pp, " and dp=", l.dp}), repaired(l));
  }
  if (w.dp % 2 == 0 && !schedules_of(job.program).empty()) {
    training_layout l = w;
    l.pp *= 2, l.dp /= 2;
    consider(cat({"pp=", l.pp, " and dp=", l.dp}), l);
  }
  for (const std::int64_t b : {w.microbatch / 2, w.microbatch * 2})
    if (b >= 1) {
      training_layout l = w;
      l.microbatch = b;
      consider(cat({"microbatch=", b}), l);
    }
  for (const plait::recompute policy : {plait::recompute::none, plait::recompute::selective, plait::recompute::full})
    if (policy != w.recompute) {
      training_layout l = w;
      l.recompute = policy, l.recompute_every = 1;
      consider(cat({"recompute=", plait::name_of(policy)}), l);
    }
  if (w.offload_activations || w.offload_optimizer) {
    training_layout l = w;
    l.offload_activations = l.offload_optimizer = false;
    consider("offload=none", l);
  }
  if (w.replicate != replication::none) {
    training_layout l = w;
    l.replicate = replication::none, l.dp_copies = 1;
    consider("replicate=none", l);
  }
  if (w.pp > 1 && w.schedule != schedule_kind::one_f_one_b) {
    training_layout l = w;
    l.schedule = schedule_kind::one_f_one_b, l.chunks = 1;
    consider("schedule=1f1b", l);
  }
  return out;
}

/// The rule of thumb: tensor parallel within a node once one accelerator cannot hold the model's state, then as few
/// stages as fit, then data parallel with the optimizer's state cut, microbatches of one sequence, and as little
/// recomputation as fits. Nothing where no such layout is legal and fits.
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

/// The sizes that have no divisor above 1 in common with the accelerators, so that their axis stays 1; empty: none.
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

/// Why a search found nothing, and what would help: where layouts are legal, by how much the smallest is too large and
/// the number of accelerators with which one fits; else the refusal of the candidate that came nearest.
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

/// By how much a layout is too large, and what would make it fit: one change of it, or the fastest layout of as many
/// accelerators that fits, or more of them.
inline std::string why_too_large(const hardware& h, const training_job& job, const layout_price& p) {
  const memory_split& m = p.memory;
  std::string out = cat({"it does not fit: rank ", p.fullest, " of the pipeline needs ", detail::gigabytes(m.total()),
                         ", ", detail::gigabytes(m.total() - h.memory), " more than a ", h.name, " has"});
  const training_layout& l = p.layout;
  std::optional<layout_price> best;
  std::string change;
  const auto consider = [&](const std::string& text, const training_layout& other) {
    if (!why_illegal(other, job).empty()) return;
    const layout_price here = price(h, job, other);
    if (here.fits && (!best || here.step() < best->step())) best = here, change = text;
  };
  for (const plait::recompute policy : {plait::recompute::selective, plait::recompute::full}) {
    training_layout other = l;
    other.recompute = policy, other.recompute_every = 1;
    if (policy != l.recompute) consider(cat({"recompute=", plait::name_of(policy)}), other);
  }
  for (int level = 1; level <= 3; ++level) {
    training_layout other = l;
    other.zero = static_cast<zero_level>(level);
    if (other.zero != l.zero && l.dp * l.cp > 1) consider(cat({"zero=", level}), other);
  }
  for (std::int64_t b = l.microbatch / 2; b >= 1; b /= 2) {
    training_layout other = l;
    other.microbatch = b;
    consider(cat({"microbatch=", b}), other);
  }
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
