#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <utility>
#include <vector>

#include "llama_parity.hpp"
#include "plait/schedule/generators.hpp"

/// Tests on meshes dp x pp x cp x tp. Schedules and policies of context parallelism alternate, so that all of them run
/// on all kinds of meshes.
namespace plait::test {

inline std::vector<pipeline_mesh> factorisations(std::int64_t ranks) {
  std::vector<pipeline_mesh> all;
  for (std::int64_t dp_ranks = 1; dp_ranks <= ranks; dp_ranks *= 2)
    for (std::int64_t pp_ranks = 1; dp_ranks * pp_ranks <= ranks; pp_ranks *= 2)
      for (std::int64_t cp_ranks = 1; dp_ranks * pp_ranks * cp_ranks <= ranks; cp_ranks *= 2)
        all.push_back({dp_ranks, pp_ranks, ranks / (dp_ranks * pp_ranks * cp_ranks), cp_ranks});
  return all;
}

/// The i-th of the schedules that this number of layers allows.
inline schedule some_schedule(int i, int ranks, int microbatches, int layers) {
  const bool two_chunks = 2 * ranks <= layers && ranks > 1;
  switch (i % (two_chunks ? 7 : 4)) {
    case 0:
      return make_schedule<one_f_one_b>(ranks, microbatches);
    case 1:
      return make_schedule<zb_h1>(ranks, microbatches);
    case 2:
      return make_schedule<gpipe>(ranks, microbatches);
    case 3:
      return make_schedule<zb_h2>(ranks, microbatches);
    case 4:
      return make_schedule<interleaved<2>>(ranks, microbatches);
    case 5:
      return make_schedule<zb_v>(ranks, microbatches);
    default:
      return make_schedule<dualpipe_v>(ranks, microbatches);
  }
}

inline constexpr chosen_policy choices[] = {chosen_policy::ring, chosen_policy::all_gather_kv, chosen_policy::ulysses};

/// Sizes for meshes of at most `ranks` ranks. In double few meshes divide the sequence, and no mesh divides the inner
/// width. Float has other sizes, because its rounding grows too fast with these.
template <class T = double>
scenario four_axes_scenario(std::int64_t ranks = 16) {
  scenario s{small_config(16, 4)};
  s.config.hidden = 16, s.config.ffn = 32, s.config.vocab = 29;
  s.config.layers = 17;
  s.batch = 16, s.microbatches = 1, s.seq = 32;
  if (sizeof(T) == 8) s.config.ffn = 97, s.seq = 37;
  if (sizeof(T) == 8 && ranks <= 8) s.batch = 8, s.seq = 19;
  s.steps = 3;
  return s;
}

/// Compares every factorisation of this number of ranks with one rank, with the two strategies in alternation. Returns
/// the number of factorisations.
template <class T, strategy First, strategy Second>
int check_four_axes(std::initializer_list<std::int64_t> sizes) {
  std::map<std::array<std::int64_t, 3>, model_outcome> one_rank;  // by sequences, microbatches and layers
  int turn = 0;
  for (const std::int64_t ranks : sizes)
    for (const pipeline_mesh& m : factorisations(ranks)) {
      scenario s = four_axes_scenario<T>(ranks);
      // AdamW divides a gradient by its own size, so rounding errors of small gradients grow from step to step.
      if (sizeof(T) == 4) s.steps = 2;
      // An odd number of layers: at least one more than stages of two chunks a rank, up to 17.
      s.config.layers = std::min<std::int64_t>(17, 2 * m.pp + 1);
      // With most data ranks each has one sequence and one microbatch; deeper pipelines have more.
      s.microbatches = m.pp == 1 ? 1 : std::min(s.batch / m.dp, 2 * m.pp);
      auto& one = one_rank[{s.batch, s.microbatches, s.config.layers}];
      if (one.steps.empty()) one = train_one<T, First>(s);
      s.options.attention.context = choices[turn % 3];
      const schedule plan = some_schedule(turn, static_cast<int>(m.pp), static_cast<int>(s.microbatches),
                                          static_cast<int>(s.config.layers));
      if (turn % 2 == 0)
        check_pipeline<T, First>(s, one, m, plan);
      else
        check_pipeline<T, Second>(s, one, m, plan);
      ++turn;
    }
  return turn;
}

}  // namespace plait::test
