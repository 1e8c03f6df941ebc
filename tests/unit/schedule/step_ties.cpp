// program: schedules
// Steps whose first and last stage share parameters: the place of the sum over both, the faults that are refused, and
// the cost of the sum.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "support/made_steps.hpp"
#include "train_llama/observe/timeline.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("the sum of a tied unit follows all passes and reductions, and precedes its update and the norm") {
  const auto both = [](const data_parallel& policy) {
    const step_schedule s = step_of("1f1b", 2, 1, policy, 2, true);
    CHECK(describe(verify(s)) == "ok");
    return text_of(s.programs[0]) + " | " + text_of(s.programs[1]);
  };
  data_parallel policy = plain;
  CHECK(both(policy) ==
        "F0:0 F0:1 S R B0:1 reduce1 B0:0 reduce0 ties0 norm update0 update1 | "
        "R F0:2 F0:3 B0:3 reduce3 B0:2 reduce2 S ties3 norm update2 update3");
  policy.overlap = false;
  CHECK(both(policy) ==
        "F0:0 F0:1 S R B0:1 B0:0 reduce1 reduce0 ties0 norm update0 update1 | "
        "R F0:2 F0:3 B0:3 B0:2 S reduce3 reduce2 ties3 norm update2 update3");
  policy = {.level = zero_level::gradients, .hybrid = true};
  CHECK(both(policy) ==
        "F0:0 F0:1 S R B0:1 reduce1 B0:0 reduce0 copies1 copies0 ties0 norm update0 gather0 update1 gather1 | "
        "R F0:2 F0:3 B0:3 reduce3 B0:2 reduce2 copies3 S copies2 ties3 norm update2 gather2 update3 gather3");
}

TEST_CASE("sums over tied stages that are early, missing, repeated or unmatched are refused, naming both entries") {
  using enum step_op;
  const step_schedule right = step_of("1f1b", 2, 1, zero1, 2, true);
  check_refused(moved(right, {reduce_ties, 0}, {reduce, 0}),
                "rank 0, entry 7 (reduction of unit 0 over tied stages): a gradient is summed over tied stages before "
                "it is reduced; see entry 8 (reduction of unit 0)");
  step_schedule s = without(right, {reduce_ties, 0});
  check_refused(s,
                "rank 0, reduction of unit 0 over tied stages: a gradient is never summed over the stages that share "
                "its parameters; see entry 8 (the norm)");
  s.policy.clip = false;
  s = without(without(s, {norm}), {.op = norm, .rank = 1});
  check_refused(s,
                "rank 0, entry 8 (update of unit 0): parameters are updated before their gradient is summed over the "
                "stages that share them; see entry 7 (reduction of unit 0)");
  check_refused(without(without(s, {update, 0}), {gather, 0}),
                "rank 0, reduction of unit 0 over tied stages: a gradient is never summed over the stages that share "
                "its parameters; see entry 7 (reduction of unit 0)");
  check_refused(with(right, {.op = norm, .rank = 1}, {reduce_ties, 3}),
                "rank 1, entry 9 (reduction of unit 3 over tied stages): a gradient is summed over tied stages twice, "
                "which would count it more than once; see entry 8 (reduction of unit 3 over tied stages)");
  check_refused(moved(right, {norm}, {reduce_ties, 0}),
                "rank 0, entry 8 (the norm): the norm is taken before a gradient is reduced; see entry 9 (reduction of "
                "unit 0 over tied stages)");
  check_refused(with(right, {norm}, {reduce_ties, 1}),
                "rank 0, entry 9 (reduction of unit 1 over tied stages): a gradient is summed over tied stages, and no "
                "other stage has its parameters (tied_to)");
  s = without(right, {reduce, 0});
  s.units[0].trainable = s.units[3].trainable = false;
  check_refused(s,
                "rank 0, entry 7 (reduction of unit 0 over tied stages): a frozen unit has no gradient to reduce and "
                "nothing to update");
  s = step_of("1f1b", 2, 1, {.level = zero_level::gradients, .hybrid = true}, 2, true);
  check_refused(moved(s, {reduce_ties, 0}, {reduce_copies, 0}),
                "rank 0, entry 9 (reduction of unit 0 over tied stages): a gradient is summed over tied stages before "
                "it is summed over the ranks with the same pieces; see entry 10 (reduction of the copies of unit 0)");
}

TEST_CASE("two ties between two ranks must be summed in one order, both before or both after the norm") {
  using enum step_op;
  const step_schedule right = tied_twice("1f1b", 4);
  REQUIRE(describe(verify(right)) == "ok");
  // If each rank uses the order of its gradients, rank 0 sums unit 1 before unit 0, and rank 1 unit 5 before unit 4.
  const std::string text = describe(verify(moved(right, {reduce_ties, 1}, {reduce_ties, 0})));
  CHECK(
      text.find("(reduction of unit 1 over tied stages): two ranks start the collectives that they share in different "
                "orders, which can deadlock; see rank 1, entry ") != std::string::npos);
  CHECK(text.find(" (reduction of unit 5 over tied stages)") != std::string::npos);
  // One end only: for rank 1 units 0 and 5 are not tied.
  CHECK(describe(verify(without(right, {reduce_ties, 4, 0, 1})))
            .find("reduction of unit 4 over tied stages: a gradient is never summed") != std::string::npos);
}

TEST_CASE("the sum of tied stages takes its time once both have reached it") {
  // Two stages of one unit each, forward 1 and backward 2: F from 0 to 1 and from 1 to 2, B from 2 to 4 on rank 1 and
  // from 4 to 6 on rank 0. A reduction sends 100 bytes in 1: rank 1's ends at 5, and rank 0's at 7.
  step_schedule s = step_of("gpipe", 2, 1, plain, 1, true);
  step_costs costs = costs_of(s, 100);
  costs.updates.assign(2, 0.5);
  CHECK(simulate(s, costs).period == doctest::Approx(7.5));
  CHECK(simulate(s, costs).ties[0].empty());
  costs.ties.assign(2, 3.0);
  const step_simulation exact = simulate(s, costs);
  CHECK(exact.period == doctest::Approx(7 + 3 + 0.5));
  CHECK(exact.waited(0, step_op::reduce_ties) == doctest::Approx(1));
  CHECK(exact.waited(0, step_op::norm) == doctest::Approx(3));
  CHECK(exact.waited(1, step_op::reduce_ties) == doctest::Approx(1));  // from 4 to 5, then continues
  CHECK(exact.waited(1, step_op::norm) == doctest::Approx(5));
  for (const auto& mine : exact.ties) {
    REQUIRE(mine.size() == 1);
    CHECK(mine[0].entry.op == step_op::reduce_ties);
    CHECK(mine[0].start == doctest::Approx(7));
    CHECK(mine[0].end == doctest::Approx(10));
  }
  CHECK(exact.hidden_share() == doctest::Approx(0));  // of the data axes' communication, which excludes ties
  const pipeline_timeline drawn = timeline_of(s, costs, "tied");
  CHECK(std::count_if(drawn.beside[1].begin(), drawn.beside[1].end(), [](const timed_entry& e) {
          return e.entry.op == step_op::reduce_ties && e.end - e.start == doctest::Approx(3);
        }) == 1);

  // Without clipping there is no norm, so the update waits.
  CHECK(simulate(step_of("gpipe", 2, 1, {.clip = false}, 1, true), costs).period == doctest::Approx(7 + 3 + 0.5));

  costs.ties = {3.0, 4.0};
  CHECK_THROWS_WITH_AS(simulate(s, costs),
                       "step_costs: ties is 3 of unit 0 and 4 of unit 1, which exchange with each other; give both the "
                       "same",
                       error);
  costs.ties = {3.0};
  CHECK_THROWS_WITH_AS(simulate(s, costs), "step_costs: ties must have one entry per unit", error);
}

TEST_CASE("two sums of the same tied stages run one after the other") {
  const step_schedule s = tied_twice("gpipe", 1);
  step_costs costs = costs_of(s, 100);
  costs.ties.assign(6, 3.0);
  const step_simulation two = simulate(s, costs);
  for (const auto& mine : two.ties) {
    REQUIRE(mine.size() == 2);
    CHECK(mine[0].end == doctest::Approx(mine[0].start + 3));
    CHECK(mine[1].start == doctest::Approx(mine[0].end));
  }
  for (const timed_entry& e : two.ranks[0])
    if (e.entry.op == step_op::norm) CHECK(e.start == doctest::Approx(two.ties[0][1].end));
}
