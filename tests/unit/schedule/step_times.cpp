// program: schedules
// Times of a simulated step: the share of communication hidden behind passes, and the waits for the rest.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "plait/schedule/simulate.hpp"
#include "plait/schedule/verify.hpp"
#include "support/made_steps.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("a step without communication takes the time of its pipeline") {
  for (const char* name : {"gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_v"})
    for (const double message : {0.0, 0.5}) {
      const schedule pipeline = parse_schedule(name, 4, 8);
      const step_schedule s = expand(pipeline, units_of(pipeline.shape.stages(), 3), plain);
      step_costs costs = costs_of(s, 0);
      costs.message = message;
      schedule_costs same{.link = message};
      same.stages.assign(static_cast<std::size_t>(pipeline.shape.stages()), {3, 6, 3, 3});
      CAPTURE(name);
      CHECK(simulate(s, costs).period == doctest::Approx(simulate(pipeline, same).makespan));
      for (int pair = 0; pair < 16; ++pair) costs.links.push_back(0.1 * pair);
      same.links = costs.links;
      CHECK(simulate(s, costs).period == doctest::Approx(simulate(pipeline, same).makespan));
      costs.links.pop_back();
      CHECK_THROWS_WITH_AS(simulate(s, costs), "step_costs: links must have one entry per pair of ranks", error);
    }
}

TEST_CASE("backward passes hide reductions as far as the link allows") {
  // Four units of 100, forward 1 and backward 2 each: 12 in all. An all-reduce over 2 ranks sends 100 bytes.
  const step_schedule s = step_of("gpipe", 1, 1, plain, 4), late = step_of("gpipe", 1, 1, {.overlap = false}, 4);
  const step_simulation fast = simulate(s, costs_of(s, 100));  // each takes 1, and only the last is exposed
  CHECK(fast.period == doctest::Approx(13));
  CHECK(fast.hidden_share() == doctest::Approx(0.75));
  CHECK(fast.waited(0, step_op::norm) == doctest::Approx(1));
  CHECK(simulate(late, costs_of(late, 100)).period == doctest::Approx(16));
  CHECK(simulate(late, costs_of(late, 100)).hidden_share() == doctest::Approx(0));
  // Each takes 4: the first ends 4 after its pass, and the others queue after it.
  const step_simulation slow = simulate(s, costs_of(s, 25));
  CHECK(slow.period == doctest::Approx(4 + 2 + 4 * 4));
  CHECK(slow.hidden_share() == doctest::Approx(6.0 / 16));
}

TEST_CASE("every update waits for the norm, and the norm for every reduction") {
  const step_schedule s = step_of("gpipe", 1, 1, plain, 4);
  step_costs costs = costs_of(s, 50);  // each reduction takes 2, as a backward pass, and an update takes 1
  costs.updates.assign(4, 1.0);
  CHECK(simulate(s, costs).period == doctest::Approx(4 + 8 + 2 + 4));  // the last reduction, and all updates after it
  costs.norm = 2;
  CHECK(simulate(s, costs).period == doctest::Approx(4 + 8 + 2 + 4 + 2));
}

TEST_CASE("forward passes of the next step hide gathers after updates, and passes hide prefetched ones") {
  // ZeRO 1 over 2 ranks: each reduction and each gather sends 50 bytes.
  const step_schedule one = step_of("gpipe", 1, 1, zero1, 4);
  const step_simulation first = simulate(one, costs_of(one, 50));  // each takes 1, as a forward pass of a unit
  CHECK(first.period == doctest::Approx(12 + 1 + 1));              // the last reduction, the first gather
  // ZeRO 3, gathering one use early: the first gather is exposed, and the last reduction.
  const step_schedule three = step_of("gpipe", 1, 1, zero3, 4);
  const step_simulation ahead = simulate(three, costs_of(three, 50));
  CHECK(ahead.waited(0, step_op::pass) == doctest::Approx(1));
  data_parallel none = zero3;
  none.prefetch = 0;
  const step_schedule behind = step_of("gpipe", 1, 1, none, 4);
  CHECK(simulate(behind, costs_of(behind, 50)).period > ahead.period + 3);
  CHECK(simulate(behind, costs_of(behind, 50)).hidden_share() < ahead.hidden_share());
}

TEST_CASE("backward passes hide the copies of a hybrid") {
  // Four units of 100 over 2 x 2 ranks. A reduction sends 50 bytes, and the reduction over copies as many, each in 1 if
  // it has the link to itself. Reductions start at 6, 8, 10 and 12, from the second on together with the previous
  // unit's copies, until 10, 12 and 14. The last copies are exposed until 15, and then the first gather.
  data_parallel policy{.level = zero_level::gradients, .hybrid = true};
  const step_schedule s = step_of("gpipe", 1, 1, policy, 4);
  step_costs costs = costs_of(s, 50);
  costs.copy_ranks = 2;
  const step_simulation hidden = simulate(s, costs);
  CHECK(hidden.period == doctest::Approx(12 + 3 + 1));
  CHECK(hidden.link_busy[0] == doctest::Approx(4 + 4 + 4));
  // One after the other after the backward pass, as if none could start earlier: the last reduction ends at 13.
  step_schedule late = s;
  for (const int unit : {3, 2, 1, 0}) late = moved(late, {step_op::reduce_copies, unit}, {step_op::norm}, -1);
  CHECK(describe(verify(late)) == "ok");
  CHECK(simulate(late, costs).period == doctest::Approx(13 + 4 + 1));
  costs.copy_ranks = 1;  // nothing to send, but still in order
  CHECK(simulate(s, costs).link_busy[0] == doctest::Approx(4 + 4));
  costs = costs_of(step_of("gpipe", 1, 1, zero1, 4), 50);
  costs.copy_ranks = 2;
  CHECK_THROWS_WITH_AS(simulate(step_of("gpipe", 1, 1, zero1, 4), costs),
                       "step_costs: copy_ranks is 2, but the policy is not a hybrid; legal is 1", error);
}

TEST_CASE("a gather and a reduction share the link") {
  // During unit 1's backward pass, the reduction of unit 2 and the gather of unit 0 are both in flight.
  const step_schedule s = step_of("gpipe", 1, 1, zero3, 3);
  const step_simulation alone = simulate(s, costs_of(s, 50)), half = simulate(s, costs_of(s, 25));
  CHECK(half.link_busy[0] == doctest::Approx(2 * alone.link_busy[0]));
  // All bytes: 5 gathers (the last unit stays gathered from its forward to its backward pass) and 3 reductions, of 50
  // each.
  CHECK(alone.link_busy[0] == doctest::Approx(8));
  CHECK(half.period > alone.period);
}

TEST_CASE("a pass waits for the gathers of all the units that it uses") {
  // ZeRO 3 without prefetch: two units, of which the last also uses the first's parameters; each gather takes 1.
  data_parallel none = zero3;
  none.prefetch = 0;
  const schedule one = parse_schedule("gpipe", 1, 1);
  std::vector<step_unit> units = units_of(1, 2);
  units[1].uses = 0;
  const step_schedule s = expand(one, units, none);
  const step_simulation times = simulate(s, costs_of(s, 50));
  for (const timed_entry& e : times.ranks[0])
    if (e.entry.op == step_op::pass && e.entry.unit == 1 && e.entry.pass.kind == action_kind::forward)
      CHECK(e.waited == doctest::Approx(2));  // both gathers start when the pass would
}
