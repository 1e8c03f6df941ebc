#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "four_axes.hpp"

/// Policies of data parallelism whose settings are drawn independently, on all kinds of meshes, each compared with one
/// rank.
namespace plait::test {

/// Numbers that depend on a key and a seed only (splitmix64), so a sweep is the same on every machine.
class drawn_numbers {
 public:
  drawn_numbers(std::uint64_t key, std::uint64_t seed) : state_(key * 0x2545f4914f6cdd1dull + seed) {}
  /// The next number, from 0 to n - 1.
  int below(int n) {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return static_cast<int>((z ^ (z >> 31)) % static_cast<std::uint64_t>(n));
  }

 private:
  std::uint64_t state_;
};

/// How buckets are split, and which optimizer updates the pieces: every valid pair.
enum class cut_for : std::uint8_t { even, whole, blocks, whole_by_muon, muon_on_copies };

struct policy_settings {
  zero_level level = zero_level::replicated;
  bool clip = true;
  int microbatches = 1;
  cut_for cut = cut_for::even;
  int hybrid = 0;  ///< 1: sharded over dp and replicated over cp; 2: the other way round
  int schedule = 0, context = 0, prefetch = 1;
  bool reshard = true, overlap = true, tied = false, recomputes = false;

  bool muon() const { return cut == cut_for::whole_by_muon || cut == cut_for::muon_on_copies; }
};

inline constexpr int few_microbatches[] = {1, 2, 5};

inline std::vector<cut_for> cuts_of(zero_level level, bool with_muon) {
  std::vector<cut_for> all{cut_for::even};
  if (level != zero_level::replicated) all.insert(all.end(), {cut_for::whole, cut_for::blocks});
  if (with_muon) all.push_back(level == zero_level::replicated ? cut_for::muon_on_copies : cut_for::whole_by_muon);
  return all;
}
inline int hybrids_of(zero_level level, const pipeline_mesh& m) {
  return level != zero_level::replicated && m.dp > 1 && m.cp > 1 ? 3 : 1;
}

/// Draws every field from all of its valid values.
inline policy_settings draw_settings(zero_level level, const pipeline_mesh& m, bool with_muon, drawn_numbers from) {
  policy_settings k;
  k.level = level;
  k.clip = from.below(3) > 0;
  k.microbatches = few_microbatches[from.below(3)];
  const std::vector<cut_for> cuts = cuts_of(level, with_muon);
  k.cut = cuts[static_cast<std::size_t>(from.below(static_cast<int>(cuts.size())))];
  k.hybrid = from.below(hybrids_of(level, m));
  k.schedule = from.below(4);
  k.context = from.below(3);
  k.prefetch = from.below(4);
  k.reshard = from.below(3) > 0;
  k.overlap = from.below(5) > 0;
  k.tied = from.below(2) == 0;
  k.recomputes = from.below(11) == 0;
  return k;
}

inline pipeline_options options_of(const policy_settings& k) {
  pipeline_options how{.parallel = {.level = k.level}};
  how.parallel.overlap = k.overlap;
  if (k.cut == cut_for::whole || k.cut == cut_for::whole_by_muon) how.cut = bucket_cut::whole;
  if (k.cut == cut_for::blocks) how.cut = bucket_cut::blocks(256);
  if (k.hybrid > 0) {
    how.axes.shard = k.hybrid == 1 ? axis_list(axis_of<dp>) : axis_list(axis_of<cp>);
    how.axes.replicate = k.hybrid == 1 ? axis_list(axis_of<cp>) : axis_list(axis_of<dp>);
  }
  if (k.level == zero_level::parameters) {
    how.parallel.prefetch = k.prefetch;
    how.parallel.reshard_after_forward = k.reshard;
  }
  return how;
}

/// Runs policies and compares them with one rank. One run on one rank serves all policies that it does not depend on.
template <class T>
class policy_sweep {
 public:
  void run(const policy_settings& k, const pipeline_mesh& m) {
    scenario s = four_axes_scenario<T>(m.size());
    s.config.layers = m.pp + 1;
    s.steps = 2;
    s.microbatches = k.microbatches;
    s.batch *= s.microbatches;
    s.clip = k.clip ? 1.0 : 0.0;
    s.config.tie_embeddings = k.tied;
    s.late_results = k.microbatches == 2;
    // AdamW divides a gradient by its own size, so it enlarges rounding errors of small gradients. This epsilon
    // prevents that.
    if (sizeof(T) == 4) s.optimizer = adamw_options{.epsilon = 1e-2};
    if (k.muon()) s.optimizer = muon_options{};
    auto& one = one_rank_[{s.batch, k.microbatches, m.pp, k.clip, k.tied, k.muon()}];
    if (one.steps.empty()) one = train_one<T, megatron_sp>(s);
    s.options.attention.context = choices[k.context];
    s.options.keep = k.recomputes ? recompute::full : recompute::none;
    s.parallel = options_of(k);
    INFO("level " << static_cast<int>(k.level) << " cut " << static_cast<int>(k.cut) << " clip " << k.clip << " hybrid "
                  << k.hybrid << " prefetch " << k.prefetch << " reshard " << k.reshard << " overlap " << k.overlap
                  << " tied " << k.tied << " context " << k.context << " recomputes " << k.recomputes);
    check_pipeline<T, context_parallel<megatron_sp, chosen<cp>, zigzag>>(
        s, one, m, some_schedule(k.schedule, static_cast<int>(m.pp), k.microbatches, 0));
    ++runs_;
    note(k, m);
  }
  int runs() const { return runs_; }
  /// The number of different pairs of values that two settings have had together.
  std::size_t pairs(const std::string& settings) const { return met_.at(settings).size(); }

 private:
  void note(const policy_settings& k, const pipeline_mesh& m) {
    const int level = static_cast<int>(k.level);
    met_["level, clip"].emplace(level, k.clip);
    met_["level, microbatches"].emplace(level, k.microbatches);
    met_["level, cut"].emplace(level, static_cast<int>(k.cut));
    met_["cut, clip"].emplace(static_cast<int>(k.cut), k.clip);
    met_["cut, microbatches"].emplace(static_cast<int>(k.cut), k.microbatches);
    if (m.pp > 1) {
      met_["level, schedule"].emplace(level, k.schedule);
      met_["cut, tied"].emplace(static_cast<int>(k.cut), k.tied);
    }
    if (m.cp > 1) met_["level, context"].emplace(level, k.context);
    if (hybrids_of(k.level, m) > 1) met_["level, hybrid"].emplace(level, k.hybrid);
    if (k.level != zero_level::parameters) return;
    met_["reshard, microbatches"].emplace(k.reshard, k.microbatches);
    met_["reshard, prefetch"].emplace(k.reshard, k.prefetch);
  }

  std::map<std::tuple<std::int64_t, int, std::int64_t, bool, bool, bool>, model_outcome> one_rank_;
  std::map<std::string, std::set<std::pair<int, int>>> met_;
  int runs_ = 0;
};

/// Runs drawn policies on every factorisation of `sizes` ranks that has data ranks. Up to 8 ranks every level runs,
/// above them one level in alternation. With PLAIT_FULL_GRID=1 in the environment every combination of level, clipping,
/// microbatches, cut, optimizer, hybrid and reshard runs, and only the other settings are drawn.
template <class T>
void sweep_policies(policy_sweep<T>& sweep, std::initializer_list<std::int64_t> sizes, bool with_muon,
                    std::uint64_t seed) {
  const char* const asked = std::getenv("PLAIT_FULL_GRID");
  const bool full = asked != nullptr && std::string(asked) == "1";
  std::uint64_t key = 0;
  int turn = 0;
  for (const std::int64_t ranks : sizes)
    for (const pipeline_mesh& m : factorisations(ranks)) {
      if (m.dp * m.cp == 1) continue;
      ++turn;
      for (const zero_level level : all_levels) {
        if (!full) {
          ++key;
          if (ranks <= 8 || static_cast<int>(level) == turn % 4)
            sweep.run(draw_settings(level, m, with_muon, drawn_numbers(key, seed)), m);
          continue;
        }
        for (const bool clip : {false, true})
          for (const int microbatches : few_microbatches)
            for (const cut_for cut : cuts_of(level, with_muon))
              for (int hybrid = 0; hybrid < hybrids_of(level, m); ++hybrid)
                for (const bool reshard : {true, false}) {
                  if (level != zero_level::parameters && !reshard) continue;
                  policy_settings k = draw_settings(level, m, with_muon, drawn_numbers(++key, seed));
                  k.clip = clip, k.microbatches = microbatches, k.cut = cut, k.hybrid = hybrid, k.reshard = reshard;
                  sweep.run(k, m);
                }
      }
    }
}

}  // namespace plait::test
