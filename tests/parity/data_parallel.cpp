// timeout: 300
// program: policies
// Policies of data parallelism equal one rank in double. Meshes dp x pp x cp x tp are all factorisations of 2, 4, 8 and
// 16 ranks that have data ranks. Up to 8 ranks every level runs, on 16 one level a mesh. The sweep combines every level
// with every cut, optimizer, clipping, number of microbatches, schedule and hybrid. With PLAIT_FULL_GRID=1
// this test runs all combinations, in hours.
#include <string>

#include "support/policy_sweep.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("policies of every level on every factorisation of up to 16 ranks with data ranks") {
  policy_sweep<double> sweep;
  sweep_policies(sweep, {2, 4, 8, 16}, true, 7);
  CHECK(sweep.runs() >= 4 * (2 + 7 + 16) + 30);
  CHECK(sweep.pairs("level, clip") == 4 * 2);
  CHECK(sweep.pairs("level, microbatches") == 4 * 3);
  CHECK(sweep.pairs("level, cut") == 2 + 3 * 4);
  CHECK(sweep.pairs("cut, clip") == 5 * 2);
  CHECK(sweep.pairs("cut, microbatches") == 5 * 3);
  CHECK(sweep.pairs("level, schedule") == 4 * 4);
  CHECK(sweep.pairs("cut, tied") == 5 * 2);
  CHECK(sweep.pairs("level, context") == 4 * 3);
  CHECK(sweep.pairs("level, hybrid") == 3 * 3);
  CHECK(sweep.pairs("reshard, microbatches") == 2 * 3);
  CHECK(sweep.pairs("reshard, prefetch") == 2 * 4);
}

TEST_CASE("stages of two chunks, whose first and last stage may be on one rank") {
  int turn = 0;
  for (const zero_level level : all_levels)
    for (int kind = 4; kind < 7; ++kind, ++turn) {
      scenario s = four_axes_scenario();
      s.config.layers = 5;
      s.microbatches = 4;
      s.steps = 2;
      s.config.tie_embeddings = turn % 2 == 0;
      const model_outcome one = train_one<double, megatron_sp>(s);
      const pipeline_mesh m{2, 2, 2, 2};
      policy_settings k = draw_settings(level, m, false, drawn_numbers(static_cast<std::uint64_t>(1000 + turn), 2));
      k.clip = true, k.microbatches = 4;
      s.parallel = options_of(k);
      CAPTURE(static_cast<int>(level));
      check_pipeline<double, context_parallel<megatron_sp, chosen<cp>, zigzag>>(s, one, m,
                                                                                some_schedule(kind, 2, 4, 5));
    }
}
