// program: schedules
// Faults inserted into a step are refused by a text that names both entries. Settings without an effect are refused by
// a text that names the valid ones.
#include <doctest/doctest.h>

#include <string>
#include <utility>
#include <vector>

#include "plait/schedule/verify.hpp"
#include "support/made_steps.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("faults in a step are refused, naming both entries") {
  using enum step_op;
  const step_schedule three = step_of("gpipe", 1, 2, zero3), one = step_of("gpipe", 1, 2, zero1);
  REQUIRE(describe(verify(three)) == "ok");
  REQUIRE(describe(verify(one)) == "ok");
  // Gathers that are late or repeated, and releases that are early, missing or repeated.
  check_refused(moved(three, {gather, 0}, 3),
                "rank 0, entry 1 (F0.0 of unit 0): a pass reads parameters that were not gathered");
  check_refused(moved(three, {release, 1}, {pass, 1}),
                "rank 0, entry 6 (F0.0 of unit 1): a pass reads parameters that were released; see entry 5 (release of "
                "unit 1)");
  check_refused(without(three, {release, 0, 3}),
                "rank 0, release of unit 0: parameters that begin a step released end it gathered; see entry 30 "
                "(gather of unit 0)");
  check_refused(with(three, 1, {gather, 0}),
                "rank 0, entry 1 (gather of unit 0): parameters are gathered that are already gathered; see entry 0 "
                "(gather of unit 0)");
  check_refused(with(three, 0, {release, 2}),
                "rank 0, entry 0 (release of unit 2): parameters are released that are not gathered");
  // Reduced before the last microbatch, once for each microbatch, and never.
  check_refused(moved(one, {reduce, 1}, {pass, 1, 2}, 1),
                "rank 0, entry 12 (B1.0 of unit 1): a pass adds to a gradient whose reduction has begun: it must come "
                "after the last microbatch; see entry 8 (reduction of unit 1)");
  check_refused(with(one, {norm}, {reduce, 2}),
                "rank 0, entry 15 (reduction of unit 2): a gradient is reduced twice, which would count it more than "
                "once; see entry 10 (reduction of unit 2)");
  check_refused(without(one, {reduce, 0}),
                "rank 0, reduction of unit 0: a gradient is never reduced; see entry 14 (the norm)");
  // The norm without one unit, after updates that need it, and not at all.
  check_refused(moved(one, {reduce, 0}, {norm}),
                "rank 0, entry 14 (the norm): the norm is taken before a gradient is reduced; see entry 15 (reduction "
                "of unit 0)");
  for (const step_schedule& s : {moved(one, {norm}, {update, 2}), without(one, {norm})})
    check_refused(s,
                  "rank 0, entry 15 (update of unit 0): parameters are updated before the norm by which their gradient "
                  "is clipped; see entry 14 (reduction of unit 0)");
  step_schedule s = without(step_of("gpipe", 1, 1, plain), {norm});
  for (const int unit : {0, 1, 2}) s = without(s, {update, unit});
  check_refused(s, "rank 0, the norm: clipping needs a norm, and there is none; see entry 8 (reduction of unit 0)");
  // Updates that are early, repeated or missing.
  check_refused(moved(one, {update, 2}, {reduce, 2}),
                "rank 0, entry 10 (update of unit 2): parameters are updated before their gradient is reduced; see "
                "entry 9 (B1.0 of unit 2)");
  check_refused(with(one, {update, 1}, {update, 2}),
                "rank 0, entry 21 (update of unit 2): parameters are updated twice; see entry 18 (update of unit 2)");
  check_refused(without(step_of("gpipe", 1, 2, plain), {update, 1}),
                "rank 0, update of unit 1: parameters are never updated; see entry 12 (reduction of unit 1)");
  // The next step would use stale parameters; a gather of a shard from the previous step.
  check_refused(without(one, {gather, 1}),
                "rank 0, gather of unit 1: parameters that begin a step gathered end it released, or updated and not "
                "gathered; see entry 18 (update of unit 1)");
  check_refused(moved(one, {gather, 1}, {update, 1}),
                "rank 0, entry 18 (gather of unit 1): parameters are gathered that are already gathered");
  // Units of a pass in the wrong order, and a frozen unit.
  check_refused(moved(one, {pass, 1}, 0),
                "rank 0, entry 0 (F0.0 of unit 1): a pass goes through all units of its stage, forward in their order "
                "and backward in the reverse");
  s = one;
  s.units[1].trainable = false;
  check_refused(
      s, "rank 0, entry 12 (reduction of unit 1): a frozen unit has no gradient to reduce and nothing to update");
}

TEST_CASE("faults in messages, and in the order of a tie and the norm, are refused") {
  using enum step_op;
  const step_schedule two = step_of("1f1b", 2, 4, plain, 2), tied = step_of("1f1b", 2, 4, plain, 2, true);
  REQUIRE(describe(verify(two)) == "ok");
  REQUIRE(describe(verify(tied)) == "ok");
  // Messages that are sent before their content exists, twice, or to a stage that there is not.
  const std::string no_pipeline = "passes and messages are not a schedule of a pipeline: rank 0, step ";
  const std::string misplaced = ": a send stands before the action that makes it, or nothing makes it";
  step_schedule s = moved(two, {send}, 0);
  check_refused(s, no_pipeline + "0 (send activation 0: stage 0 -> 1)" + misplaced);
  CHECK_THROWS_WITH(require_verified(s, 0),
                    ("step: " + no_pipeline + "0 (send activation 0: stage 0 -> 1)" + misplaced).c_str());
  const place received{.op = receive, .rank = 1};
  check_refused(with(with(two, {send}, entry_at(two, {send})), received, entry_at(two, received)),
                no_pipeline + "2 (send activation 0: stage 0 -> 1): a rank sends or receives one message twice");
  s = two;
  s.programs[0][static_cast<std::size_t>(place_of(s, {send}))].transfer.to_stage = 9;
  check_refused(s, no_pipeline + "1 (send activation 0: stage 0 -> 9)" + misplaced);
  check_refused(moved(tied, received, {pass, 2, 0, 1}),  // inside a pass
                "rank 1, entry 2 (receive activation 0: stage 0 -> 1): a message stands between the units of one pass, "
                "which is one action of the pipeline");

  s = moved(tied, {.op = norm, .rank = 1}, {reduce, 3, 0, 1});
  s.policy.clip = false;
  const std::string crossed = describe(verify(s));
  CHECK(crossed.find("rank 1, entry") == 0);  // the norm does not wait for the tie's gradient
  CHECK(crossed.find("the norm is taken before a gradient is reduced") != std::string::npos);
}

TEST_CASE("a hybrid reduces the copies of a piece after the piece, before the norm and its update") {
  using enum step_op;
  const step_schedule right = step_of("gpipe", 1, 1, {.level = zero_level::gradients, .hybrid = true}, 2);
  CHECK(text_of(right.programs[0]) ==
        "F0:0 F0:1 B0:1 reduce1 B0:0 reduce0 copies1 copies0 norm update0 gather0 update1 gather1");
  CHECK_THROWS_WITH_AS(step_of("gpipe", 1, 1, {.hybrid = true}),
                       "step: hybrid = 1 would change nothing, because whole gradients are reduced over all data axes "
                       "at once; it is for levels from zero_level::optimizer on, and 0 is legal here",
                       error);
  check_refused(moved(right, {reduce_copies, 1}, {reduce, 1}),
                "rank 0, entry 3 (reduction of the copies of unit 1): pieces of a gradient are summed over ranks with "
                "the same pieces before the gradient is reduced; see entry 4 (reduction of unit 1)");
  check_refused(with(right, {norm}, {reduce_copies, 1}),
                "rank 0, entry 8 (reduction of the copies of unit 1): pieces of a gradient are summed twice over ranks "
                "with the same pieces; see entry 6 (reduction of the copies of unit 1)");
  check_refused(moved(right, {norm}, {reduce_copies, 0}),
                "rank 0, entry 7 (the norm): the norm is taken before a gradient is reduced; see entry 8 (reduction of "
                "the copies of unit 0)");
  step_schedule s = without(right, {reduce_copies, 0});
  check_refused(s,
                "rank 0, reduction of the copies of unit 0: pieces of a gradient are never summed over the ranks with "
                "the same pieces; see entry 7 (the norm)");
  s = without(s, {norm});
  s.policy.clip = false;
  check_refused(s,
                "rank 0, entry 7 (update of unit 0): parameters are updated before their gradient is summed over the "
                "ranks with the same pieces; see entry 5 (reduction of unit 0)");
  s = right;
  s.policy.hybrid = false;
  check_refused(s,
                "rank 0, entry 6 (reduction of the copies of unit 1): pieces of a gradient are summed over ranks with "
                "the same pieces, and the policy has none (hybrid)");
}

TEST_CASE("a norm that only one of two ranks has is refused") {
  const step_schedule s = step_of("1f1b", 2, 4, {.clip = false}, 2);
  REQUIRE(describe(verify(s)) == "ok");
  CHECK(describe(verify(with(s, {step_op::update, 2, 0, 1}, {step_op::norm})))
            .find("(the norm): a collective that another rank takes part in is never started there") !=
        std::string::npos);
}

TEST_CASE("a replicated policy gathers nothing") {
  check_refused(with(step_of("gpipe", 1, 1, plain, 2), 9, {step_op::gather, 0}),
                "rank 0, entry 9 (gather of unit 0): parameters are gathered that are already gathered");
}

TEST_CASE("settings without an effect, and invalid units, are refused") {
  const auto refused = [](const data_parallel& policy, const char* text) {
    CHECK_THROWS_WITH_AS(step_of("gpipe", 1, 2, policy), text, error);
  };
  refused(
      {.level = zero_level::optimizer, .prefetch = 2},
      "step: prefetch = 2 and reshard_after_forward = 1 would change nothing, because parameters stay gathered; they "
      "are for zero_level::parameters, and 1 and 1 are legal with the others");
  refused({.level = zero_level::parameters, .prefetch = 4},
          "step: prefetch is 4, but there are 3 units to gather; legal is 0 to 3");
  refused({.level = zero_level::parameters, .prefetch = -1}, "step: prefetch is -1; legal is 0 or more");
  const auto idle = [](const data_parallel& policy, int units, const char* text) {
    CHECK_THROWS_WITH_AS(step_of("gpipe", 1, 1, policy, units), text, error);
  };
  idle({.level = zero_level::parameters, .reshard_after_forward = false}, 1,
       "step: reshard_after_forward = 0 would change nothing, because every unit is held from its forward to its "
       "backward pass anyway; legal is 1");
  idle({.level = zero_level::parameters, .prefetch = 3, .reshard_after_forward = false}, 3,
       "step: prefetch = 3 starts no gather earlier than 2 does; legal is less");
  idle({.overlap = false}, 1,
       "step: overlap = 0 would change nothing, because no pass comes after the first reduction; legal is 1");
  std::vector<step_unit> units = units_of(2, 2);
  std::swap(units.front(), units.back());
  CHECK_THROWS_WITH_AS(expand(parse_schedule("1f1b", 2, 4), units, plain),
                       "step: unit 1 is of stage 0; units stand in the order of stages 0 to 1", error);
  units = units_of(2, 2);
  units[0].tied_to = 3;
  CHECK_THROWS_WITH_AS(expand(parse_schedule("1f1b", 2, 4), units, plain),
                       "step: unit 0 is tied to 3, which must be another unit that is tied to it", error);
}
