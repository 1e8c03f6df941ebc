// timeout: 300
// program: policies
// Policies of data parallelism equal one rank, in float, on every factorisation of 4 and 8 ranks that has data ranks.
// Muon is tested in double only: its five steps of Newton-Schulz enlarge rounding errors about a hundred times.
#include "support/policy_sweep.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("policies of every level on every factorisation of 4 and 8 ranks with data ranks") {
  policy_sweep<float> sweep;
  sweep_policies(sweep, {4, 8}, false, 1);
  CHECK(sweep.runs() >= 4 * (7 + 16));
  CHECK(sweep.pairs("level, clip") == 4 * 2);
  CHECK(sweep.pairs("level, microbatches") == 4 * 3);
  CHECK(sweep.pairs("level, cut") == 1 + 3 * 3);
}
