// program: schedules
// Whole steps: the expansion for each policy, its validity for every schedule, and its memory.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "plait/schedule/verify.hpp"
#include "support/made_steps.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("the step of each policy, written by hand") {
  CHECK(text_of(step_of("gpipe", 1, 1, plain, 3).programs[0]) ==
        "F0:0 F0:1 F0:2 B0:2 reduce2 B0:1 reduce1 B0:0 reduce0 norm update0 update1 update2");
  CHECK(text_of(step_of("gpipe", 1, 1, plain, 2).programs[0]) ==
        "F0:0 F0:1 B0:1 reduce1 B0:0 reduce0 norm update0 update1");
  CHECK(text_of(step_of("gpipe", 1, 2, zero1, 2).programs[0]) ==
        "F0:0 F0:1 F1:0 F1:1 B0:1 B0:0 B1:1 reduce1 B1:0 reduce0 norm update0 gather0 update1 gather1");
  CHECK(text_of(
            step_of("gpipe", 1, 1, {.level = zero_level::gradients, .overlap = false, .clip = false}, 2).programs[0]) ==
        "F0:0 F0:1 B0:1 B0:0 reduce1 reduce0 update0 gather0 update1 gather1");
  CHECK(text_of(step_of("gpipe", 1, 1, {.level = zero_level::parameters, .prefetch = 0}, 2).programs[0]) ==
        "gather0 F0:0 release0 gather1 F0:1 release1 gather1 B0:1 release1 reduce1 gather0 B0:0 release0 reduce0 norm "
        "update0 update1");
  CHECK(text_of(step_of("gpipe", 1, 1, zero3, 3).programs[0]) ==
        "gather0 gather1 F0:0 release0 gather2 F0:1 release1 F0:2 gather1 B0:2 release2 reduce2 gather0 B0:1 release1 "
        "reduce1 B0:0 release0 reduce0 norm update0 update1 update2");
  CHECK(text_of(
            step_of("gpipe", 1, 1, {.level = zero_level::parameters, .reshard_after_forward = false}, 2).programs[0]) ==
        "gather0 gather1 F0:0 F0:1 B0:1 release1 reduce1 B0:0 release0 reduce0 norm update0 update1");
}

TEST_CASE("a head that uses the embedding's parameters") {
  std::vector<step_unit> units(3);
  units[2].uses = 0;
  const schedule one = make_schedule<one_f_one_b>(1, 1);
  const step_schedule s = expand(one, units, {.level = zero_level::parameters, .prefetch = 0});
  CHECK(describe(verify(s)) == "ok");
  CHECK(text_of(s.programs[0]) ==
        "gather0 F0:0 release0 gather1 F0:1 release1 gather2 gather0 F0:2 release2 release0 gather2 gather0 B0:2 "
        "release2 release0 reduce2 gather1 B0:1 release1 reduce1 gather0 B0:0 release0 reduce0 norm update0 update1 "
        "update2");
  check_refused(without(s, {step_op::gather, 0, 1}),
                "rank 0, entry 7 (F0.0 of unit 2): a pass reads parameters that were released; see entry 2 (release of "
                "unit 0)");
  // A unit stays gathered until its next use if that is near.
  CHECK(describe(verify(expand(one, units, {.level = zero_level::parameters, .prefetch = 3}))) == "ok");
  units[2].uses = 2;
  CHECK_THROWS_WITH(expand(one, units, {}), "step: unit 2 uses 2, which must be another unit of the same rank");
}

TEST_CASE("a step of forward passes only has neither gradients nor updates") {
  const schedule forward{"forward", {1, 1, 2}, {{forward_of(0, 0), forward_of(0, 1)}}};
  const std::vector<step_unit> units(2);
  for (const data_parallel& policy : {plain, zero1, zero2}) {
    const step_schedule s = expand(forward, units, policy);
    CHECK(text_of(s.programs[0]) == "F0:0 F0:1 F1:0 F1:1");
  }
  CHECK(text_of(expand(forward, units, {.level = zero_level::parameters, .prefetch = 0}).programs[0]) ==
        "gather0 F0:0 release0 gather1 F0:1 release1 gather0 F1:0 release0 gather1 F1:1 release1");
}

TEST_CASE("every schedule with every policy makes a valid step") {
  int steps = 0;
  for (const char* name : {"gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_v", "dualpipe_v", "v_half"})
    for (const int ranks : {1, 2, 4})
      for (const int microbatches : {1, 2, 5, 8, 16})
        for (const zero_level level :
             {zero_level::replicated, zero_level::optimizer, zero_level::gradients, zero_level::parameters})
          for (const bool overlap : {true, false})
            for (const int prefetch : {0, 1, 2}) {
              data_parallel policy{.level = level, .overlap = overlap};
              if (level == zero_level::parameters) policy.prefetch = prefetch;
              policy.reshard_after_forward = level != zero_level::parameters || prefetch != 2;
              step_schedule s;
              try {
                s = step_of(name, ranks, microbatches, policy, 3, ranks > 1);
              } catch (const error&) {
                CHECK_THROWS_AS(parse_schedule(name, ranks, microbatches), error);
                continue;  // the schedule does not support these sizes
              }
              ++steps;
              CAPTURE(name);
              CAPTURE(ranks);
              CAPTURE(microbatches);
              CAPTURE(static_cast<int>(level));
              CHECK(describe(verify(s)) == "ok");
              policy.hybrid = level != zero_level::replicated;
              CHECK(describe(verify(step_of(name, ranks, microbatches, policy, 3, ranks > 1))) == "ok");
              for (int r = 0; r < ranks; ++r) {
                const auto& program = s.programs[static_cast<std::size_t>(r)];
                const auto count = [&](step_op op) {
                  return std::count_if(program.begin(), program.end(), [&](const step_entry& e) { return e.op == op; });
                };
                const auto units = 3 * s.shape.chunks;
                CHECK(count(step_op::reduce) == units);  // for any number of microbatches
                CHECK(count(step_op::update) == units);
                if (ranks > 1 && r == 0) CHECK(count(step_op::reduce_ties) >= 1);
                if (level != zero_level::parameters)
                  CHECK(count(step_op::gather) == (level == zero_level::replicated ? 0 : units));
              }
            }
  CHECK(steps > 1000);
}

TEST_CASE("peaks of memory, and limits") {
  const step_memory memory{.parameter = 2, .gradient = 4, .data_ranks = 4};
  // Four units of 100: all are gathered, with all gradients.
  CHECK(peak_bytes(step_of("gpipe", 1, 1, plain, 4), 0, memory) == 4 * 100 * (2.0 + 4));
  // The second unit's backward pass: it and the first are gathered, and three gradients are whole.
  CHECK(peak_bytes(step_of("gpipe", 1, 1, zero3, 4), 0, memory) == 100 * (2 * 2.0 + 2 * 0.5 + 3 * 4.0));
  step_memory limited = memory;
  limited.most = 1000;
  const std::string text = describe(verify(step_of("gpipe", 1, 1, plain, 4), limited));
  CHECK(text.find("parameters, gradients and activations are over the limit: 1200") != std::string::npos);
}
