// timeout: 300
// Every policy of data parallelism, on every factorisation dp x pp x cp x tp of 2, 4, 8 and 16 ranks that has data
// ranks, equals one rank, in double: with 1, 2 and 5 microbatches, with and without clipping, under all schedules.
#include <algorithm>
#include <map>
#include <tuple>

#include "support/four_axes.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// The policies, and of each the choices that it has, so that all meet all kinds of meshes in turn.
pipeline_options some_policy(zero_level level, int turn, const pipeline_mesh& m, std::int64_t microbatches) {
  pipeline_options how;
  how.parallel.level = level;
  how.parallel.overlap = turn % 5 != 0;
  if (level == zero_level::replicated) return how;
  if (m.dp > 1 && m.cp > 1 && turn % 2 == 0) {  // a hybrid
    how.axes.shard = turn % 4 == 0 ? axis_list(axis_of<dp>) : axis_list(axis_of<cp>);
    how.axes.replicate = turn % 4 == 0 ? axis_list(axis_of<cp>) : axis_list(axis_of<dp>);
  }
  if (level >= zero_level::gradients && microbatches == 1) how.parallel.gradient_buffers = turn % 3;
  if (level != zero_level::parameters) return how;
  how.parallel.prefetch = turn / 3 % 4;
  how.parallel.reshard_after_forward = turn % 3 != 1;
  return how;
}

}  // namespace

TEST_CASE("every policy on every factorisation of up to 16 ranks with data ranks") {
  std::map<std::tuple<std::int64_t, std::int64_t, bool, bool>, rank_outcome> one_rank;
  int turn = 0;
  for (const std::int64_t ranks : {2, 4, 8, 16})
    for (const pipeline_mesh& m : factorisations(ranks)) {
      if (m.dp * m.cp == 1) continue;
      for (const zero_level level :
           {zero_level::replicated, zero_level::optimizer, zero_level::gradients, zero_level::parameters}) {
        scenario s = four_axes_scenario();
        s.config.layers = m.pp + 1;
        s.steps = 2;
        s.microbatches = turn % 3 == 0 ? 1 : turn % 3 == 1 ? 2 : 5;
        s.batch = 16 * s.microbatches;
        s.clip = turn % 2 == 0 ? 1.0 : 0.0;
        s.config.tie_embeddings = turn % 7 < 3;
        auto& one = one_rank[{s.microbatches, s.config.layers, s.clip > 0, s.config.tie_embeddings}];
        if (one.steps.empty()) one = train_one<double, megatron_sp>(s);
        s.options.attention.context = choices[turn % 3];
        s.options.keep = turn % 11 == 0 ? recompute::full : recompute::none;
        s.parallel = some_policy(level, turn, m, s.microbatches);
        CAPTURE(static_cast<int>(level));
        CAPTURE(turn);
        const schedule plan = some_schedule(turn, static_cast<int>(m.pp), static_cast<int>(s.microbatches), 0);
        check_pipeline<double, context_parallel<megatron_sp, chosen<cp>, zigzag>>(s, one, m, plan);
        ++turn;
      }
    }
  CHECK(turn == 4 * (2 + 7 + 16 + 30));
}

TEST_CASE("Muon on pieces that are whole matrices") {
  scenario s = four_axes_scenario();
  s.config.layers = 3;
  s.steps = 2;
  s.batch = 16, s.microbatches = 2;
  s.optimizer = muon_options{};
  const rank_outcome one = train_one<double, megatron_sp>(s);
  for (const zero_level level : {zero_level::optimizer, zero_level::gradients, zero_level::parameters})
    for (const pipeline_mesh& m : {pipeline_mesh{2}, {8}, {2, 2, 2, 1}, {2, 1, 2, 2}, {1, 2, 1, 4}}) {
      s.parallel.parallel.level = level;
      s.parallel.cut = bucket_cut::whole;
      CAPTURE(static_cast<int>(level));
      check_pipeline<double, context_parallel<megatron_sp, chosen<cp>, zigzag>>(
          s, one, m, some_schedule(1, static_cast<int>(m.pp), 2, 0));
    }
}

TEST_CASE("stages of two chunks, whose first and last may be one rank's") {
  int turn = 0;
  for (const zero_level level :
       {zero_level::replicated, zero_level::optimizer, zero_level::gradients, zero_level::parameters})
    for (int kind = 4; kind < 7; ++kind, ++turn) {
      scenario s = four_axes_scenario();
      s.config.layers = 5;
      s.microbatches = 4;
      s.steps = 2;
      s.config.tie_embeddings = turn % 2 == 0;
      const rank_outcome one = train_one<double, megatron_sp>(s);
      const pipeline_mesh m{2, 2, 2, 2};
      s.parallel = some_policy(level, turn + 1, m, s.microbatches);
      CAPTURE(static_cast<int>(level));
      check_pipeline<double, context_parallel<megatron_sp, chosen<cp>, zigzag>>(s, one, m,
                                                                                some_schedule(kind, 2, 4, 5));
    }
}
