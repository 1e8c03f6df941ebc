// program: schedules
// Whole steps: what the expansion makes is accepted for every schedule and policy, and faults that are put into it are
// refused by a text that names both entries.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include "plait/schedule/parse.hpp"
#include "plait/schedule/step/expand.hpp"
#include "plait/schedule/step/simulate.hpp"
#include "plait/schedule/step/verify.hpp"
#include "plait/schedule/timeline.hpp"

using namespace plait;

namespace {

/// `each` units in every stage; with more than one stage, the first and the last unit may be tied.
std::vector<step_unit> units_of(int stages, int each, bool tied = false) {
  std::vector<step_unit> units;
  for (int stage = 0; stage < stages; ++stage)
    for (int i = 0; i < each; ++i) units.push_back({.stage = stage, .parameters = 100});
  if (tied) units.front().tied_to = stages * each - 1, units.back().tied_to = 0;
  return units;
}

step_schedule step_of(const char* name, int ranks, int microbatches, const data_parallel& policy, int each = 3,
                      bool tied = false) {
  const schedule s = parse_schedule(name, ranks, microbatches);
  return expand(s, units_of(s.shape.stages(), each, tied), policy);
}

std::string text_of(const std::vector<step_entry>& program) {
  std::string text;
  for (const step_entry& e : program) {
    const char* const names[] = {"", "S", "R", "gather", "release", "reduce", "norm", "update", "copies"};
    if (!text.empty()) text += ' ';
    text += names[static_cast<int>(e.op)];
    if (e.op == step_op::pass) text += std::string(1, letter(e.pass.kind)) + std::to_string(e.pass.microbatch) + ":";
    if (e.unit >= 0) text += std::to_string(e.unit);
  }
  return text;
}

int place_of(const step_schedule& s, int rank, step_op op, int unit, int which = 0) {
  const std::vector<step_entry>& program = s.programs[static_cast<std::size_t>(rank)];
  for (std::size_t i = 0; i < program.size(); ++i)
    if (program[i].op == op && program[i].unit == unit && which-- == 0) return static_cast<int>(i);
  FAIL("there is no such entry");
  return -1;
}
void move(step_schedule& s, int rank, int from, int to) {
  std::vector<step_entry>& program = s.programs[static_cast<std::size_t>(rank)];
  const step_entry e = program[static_cast<std::size_t>(from)];
  program.erase(program.begin() + from);
  program.insert(program.begin() + to, e);
}
void erase(step_schedule& s, int rank, int at) {
  s.programs[static_cast<std::size_t>(rank)].erase(s.programs[static_cast<std::size_t>(rank)].begin() + at);
}
void insert(step_schedule& s, int rank, int at, const step_entry& e) {
  s.programs[static_cast<std::size_t>(rank)].insert(s.programs[static_cast<std::size_t>(rank)].begin() + at, e);
}

constexpr data_parallel plain{}, zero1{.level = zero_level::optimizer}, zero2{.level = zero_level::gradients},
    zero3{.level = zero_level::parameters};

}  // namespace

TEST_CASE("the step of each policy, by hand") {
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

TEST_CASE("with the norm of the step before, a unit is updated while the next is reduced") {
  data_parallel policy = plain;
  policy.delayed_norm = true;
  CHECK(text_of(step_of("gpipe", 1, 1, policy, 3).programs[0]) ==
        "F0:0 F0:1 F0:2 B0:2 reduce2 B0:1 reduce1 update2 B0:0 reduce0 update1 update0 norm");
  policy.level = zero_level::gradients;
  CHECK(text_of(step_of("gpipe", 1, 2, policy, 2).programs[0]) ==
        "F0:0 F0:1 F1:0 F1:1 B0:1 B0:0 B1:1 reduce1 B1:0 reduce0 update1 gather1 update0 gather0 norm");
  policy.level = zero_level::parameters;
  policy.prefetch = 0;
  CHECK(text_of(step_of("gpipe", 1, 1, policy, 2).programs[0]) ==
        "gather0 F0:0 release0 gather1 F0:1 release1 gather1 B0:1 release1 reduce1 gather0 B0:0 release0 reduce0 "
        "update1 update0 norm");
  policy = plain;
  policy.delayed_norm = true;

  // Two things may go wrong: an update whose norm has gone, and, where the norm is exact, one whose norm has not come.
  step_schedule s = step_of("gpipe", 1, 1, policy, 3);
  move(s, 0, place_of(s, 0, step_op::norm, -1), place_of(s, 0, step_op::update, 0));
  CHECK(describe(verify(s)) ==
        "rank 0, entry 12 (update of unit 0): parameters are clipped by the norm of the step before, and updated after "
        "this step's has taken its place; see entry 11 (the norm)");
  s = step_of("gpipe", 1, 1, policy, 3);
  s.policy.delayed_norm = false;
  CHECK(describe(verify(s)) ==
        "rank 0, entry 7 (update of unit 2): parameters are updated before the norm by which their gradient is "
        "clipped; see entry 4 (reduction of unit 2)");
  s = step_of("gpipe", 1, 1, policy, 3);
  erase(s, 0, place_of(s, 0, step_op::norm, -1));  // the next step needs it
  CHECK(describe(verify(s)) ==
        "rank 0, the norm: clipping needs a norm, and there is none; see entry 9 (reduction of unit 0)");
  s = step_of("gpipe", 1, 1, policy, 3);  // an update never goes without its own reduction
  move(s, 0, place_of(s, 0, step_op::update, 2), place_of(s, 0, step_op::reduce, 2));
  CHECK(describe(verify(s)) ==
        "rank 0, entry 4 (update of unit 2): parameters are updated before their gradient is reduced; see entry 3 "
        "(B0.0 of unit 2)");
  s = step_of("gpipe", 1, 2, policy, 3);  // and not before the last pass that reads what it changes
  move(s, 0, place_of(s, 0, step_op::reduce, 2), place_of(s, 0, step_op::pass, 2, 3));
  CHECK_FALSE(verify(s).ok());
  policy.clip = false;
  CHECK_THROWS_WITH_AS(step_of("gpipe", 1, 1, policy),
                       "step: delayed_norm = 1 would change nothing without clip; legal is 0", error);
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
  step_schedule early = s;
  erase(early, 0, place_of(early, 0, step_op::gather, 0, 1));
  CHECK(
      describe(verify(early)) ==
      "rank 0, entry 7 (F0.0 of unit 2): a pass reads parameters that were released; see entry 2 (release of unit 0)");
  // Both are kept where the next use is near.
  CHECK(describe(verify(expand(one, units, {.level = zero_level::parameters, .prefetch = 3}))) == "ok");
  units[2].uses = 2;
  CHECK_THROWS_WITH(expand(one, units, {}), "step: unit 2 uses 2, which must be another unit of the same rank");
}

TEST_CASE("forward passes alone have neither gradients nor updates") {
  const schedule forward{"forward", {1, 1, 2}, {{forward_of(0, 0), forward_of(0, 1)}}};
  const std::vector<step_unit> units(2);
  for (const data_parallel& policy : {plain, zero1, zero2}) {
    const step_schedule s = expand(forward, units, policy);
    CHECK(text_of(s.programs[0]) == "F0:0 F0:1 F1:0 F1:1");
  }
  CHECK(text_of(expand(forward, units, {.level = zero_level::parameters, .prefetch = 0}).programs[0]) ==
        "gather0 F0:0 release0 gather1 F0:1 release1 gather0 F1:0 release0 gather1 F1:1 release1");
}

TEST_CASE("every schedule under every policy makes a step that is right") {
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
                continue;  // the schedule has no such sizes
              }
              ++steps;
              const step_verdict v = verify(s);
              policy.delayed_norm = true;
              CHECK(describe(verify(step_of(name, ranks, microbatches, policy, 3, ranks > 1))) == "ok");
              policy.hybrid = level != zero_level::replicated;
              for (const bool delayed : {false, true}) {
                policy.delayed_norm = delayed;
                CHECK(describe(verify(step_of(name, ranks, microbatches, policy, 3, ranks > 1))) == "ok");
              }
              CAPTURE(name);
              CAPTURE(ranks);
              CAPTURE(microbatches);
              CAPTURE(static_cast<int>(level));
              CHECK(describe(v) == "ok");
              for (int r = 0; r < ranks; ++r) {
                const auto& program = s.programs[static_cast<std::size_t>(r)];
                const auto count = [&](step_op op) {
                  return std::count_if(program.begin(), program.end(), [&](const step_entry& e) { return e.op == op; });
                };
                const auto units = 3 * s.shape.chunks;
                CHECK(count(step_op::reduce) == units);  // whatever the number of microbatches
                CHECK(count(step_op::update) == units);
                if (level != zero_level::parameters)
                  CHECK(count(step_op::gather) == (level == zero_level::replicated ? 0 : units));
              }
            }
  CHECK(steps > 1000);
}

TEST_CASE("faults in a step are refused, and both entries are named") {
  const auto refused = [](const step_schedule& s, const std::string& text, const step_memory& memory = {}) {
    CHECK(describe(verify(s, memory)) == text);
  };
  const step_schedule three = step_of("gpipe", 1, 2, zero3), one = step_of("gpipe", 1, 2, zero1);
  REQUIRE(describe(verify(three)) == "ok");
  REQUIRE(describe(verify(one)) == "ok");

  step_schedule s = three;  // gather too late
  move(s, 0, place_of(s, 0, step_op::gather, 0), 3);
  refused(s, "rank 0, entry 1 (F0.0 of unit 0): a pass reads parameters that were not gathered");

  s = three;  // release too early
  move(s, 0, place_of(s, 0, step_op::release, 1), place_of(s, 0, step_op::pass, 1));
  refused(s,
          "rank 0, entry 6 (F0.0 of unit 1): a pass reads parameters that were released; see entry 5 (release of unit "
          "1)");

  s = three;  // never released
  erase(s, 0, place_of(s, 0, step_op::release, 0, 3));
  refused(s,
          "rank 0, release of unit 0: parameters that begin a step released end it gathered; see entry 30 (gather of "
          "unit 0)");

  s = three;
  insert(s, 0, 1, {step_op::gather, 0, {}, {}});
  refused(
      s,
      "rank 0, entry 1 (gather of unit 0): parameters are gathered that lie gathered; see entry 0 (gather of unit 0)");

  s = three;
  insert(s, 0, 0, {step_op::release, 2, {}, {}});
  refused(s, "rank 0, entry 0 (release of unit 2): parameters are released that do not lie gathered");

  s = one;  // reduced before the last microbatch
  move(s, 0, place_of(s, 0, step_op::reduce, 1), place_of(s, 0, step_op::pass, 1, 2) + 1);
  refused(s,
          "rank 0, entry 12 (B1.0 of unit 1): a pass adds to a gradient whose reduction has begun: it must come after "
          "the last microbatch; see entry 8 (reduction of unit 1)");

  s = one;  // once for each microbatch
  insert(s, 0, place_of(s, 0, step_op::norm, -1), {step_op::reduce, 2, {}, {}});
  refused(
      s,
      "rank 0, entry 15 (reduction of unit 2): a gradient is reduced twice, which would count it more than once; see "
      "entry 10 (reduction of unit 2)");

  s = one;  // the norm without one unit
  move(s, 0, place_of(s, 0, step_op::reduce, 0), place_of(s, 0, step_op::norm, -1));
  refused(
      s,
      "rank 0, entry 14 (the norm): the norm is taken before a gradient is reduced; see entry 15 (reduction of unit "
      "0)");

  s = one;  // a unit that is never reduced
  erase(s, 0, place_of(s, 0, step_op::reduce, 0));
  refused(s, "rank 0, reduction of unit 0: a gradient is never reduced; see entry 14 (the norm)");

  s = one;  // clipped by a norm that comes later
  move(s, 0, place_of(s, 0, step_op::norm, -1), place_of(s, 0, step_op::update, 2));
  refused(s,
          "rank 0, entry 15 (update of unit 0): parameters are updated before the norm by which their gradient is "
          "clipped; see entry 14 (reduction of unit 0)");

  s = one;
  move(s, 0, place_of(s, 0, step_op::update, 2), place_of(s, 0, step_op::reduce, 2));
  refused(s,
          "rank 0, entry 10 (update of unit 2): parameters are updated before their gradient is reduced; see entry 9 "
          "(B1.0 of unit 2)");

  s = one;
  insert(s, 0, place_of(s, 0, step_op::update, 1), {step_op::update, 2, {}, {}});
  refused(s, "rank 0, entry 21 (update of unit 2): parameters are updated twice; see entry 18 (update of unit 2)");

  s = step_of("gpipe", 1, 2, plain);
  erase(s, 0, place_of(s, 0, step_op::update, 1));
  refused(s, "rank 0, update of unit 1: parameters are never updated; see entry 12 (reduction of unit 1)");

  s = one;  // the next step would use stale parameters
  erase(s, 0, place_of(s, 0, step_op::gather, 1));
  refused(
      s,
      "rank 0, gather of unit 1: parameters that begin a step gathered end it released, or updated and not gathered; "
      "see entry 18 (update of unit 1)");

  s = one;  // a shard of the last step is gathered
  move(s, 0, place_of(s, 0, step_op::gather, 1), place_of(s, 0, step_op::update, 1));
  refused(s, "rank 0, entry 18 (gather of unit 1): parameters are gathered that lie gathered");

  s = one;
  erase(s, 0, place_of(s, 0, step_op::norm, -1));
  refused(s,
          "rank 0, entry 15 (update of unit 0): parameters are updated before the norm by which their gradient is "
          "clipped; see entry 14 (reduction of unit 0)");

  s = one;  // units of a pass in the wrong order
  move(s, 0, place_of(s, 0, step_op::pass, 1), 0);
  refused(s,
          "rank 0, entry 0 (F0.0 of unit 1): a pass goes through all units of its stage, forward in their order and "
          "backward in the reverse");

  s = one;  // two gradients in one buffer
  s.units[0].gradient_buffer = s.units[1].gradient_buffer = 0;
  refused(s,
          "rank 0, entry 8 (B0.0 of unit 0): a pass adds to a gradient in a buffer that holds another unit's, whose "
          "reduction has not begun; see entry 7 (B0.0 of unit 1)");

  s = one;  // frozen
  s.units[1].trainable = false;
  refused(s, "rank 0, entry 12 (reduction of unit 1): a frozen unit has no gradient to reduce and nothing to update");

  s = step_of("1f1b", 2, 4, plain, 2, true);  // the tie and the norm, in opposite orders
  REQUIRE(describe(verify(s)) == "ok");
  s.policy.clip = false;
  move(s, 1, place_of(s, 1, step_op::norm, -1), place_of(s, 1, step_op::reduce, 3));
  const std::string crossed = describe(verify(s));
  CHECK(crossed.find("rank 1, entry") == 0);  // the norm does not wait for the tie's gradient
  CHECK(crossed.find("the norm is taken before a gradient is reduced") != std::string::npos);

  s = step_of("1f1b", 2, 4, plain, 2, true);  // a receive within a pass
  move(s, 1, place_of(s, 1, step_op::receive, -1), place_of(s, 1, step_op::pass, 2));
  refused(
      s,
      "rank 1, entry 2 (receive activation 0: stage 0 -> 1): a message stands between the units of one pass, which is "
      "one action of the pipeline");
}

TEST_CASE("a hybrid reduces the copies of a piece once it is reduced, before the norm and its update") {
  data_parallel policy{.level = zero_level::gradients, .hybrid = true};
  const step_schedule right = step_of("gpipe", 1, 1, policy, 2);
  CHECK(text_of(right.programs[0]) ==
        "F0:0 F0:1 B0:1 reduce1 B0:0 reduce0 copies1 copies0 norm update0 gather0 update1 gather1");
  policy.delayed_norm = true;
  CHECK(text_of(step_of("gpipe", 1, 1, policy, 3).programs[0]) ==
        "F0:0 F0:1 F0:2 B0:2 reduce2 B0:1 reduce1 copies2 B0:0 reduce0 copies1 update2 gather2 copies0 update1 gather1 "
        "update0 gather0 norm");
  policy = {.hybrid = true};
  CHECK_THROWS_WITH_AS(step_of("gpipe", 1, 1, policy),
                       "step: hybrid = 1 would change nothing, because whole gradients are reduced over all data axes "
                       "at once; it is for levels from zero_level::optimizer on, and 0 is legal here",
                       error);

  const auto refused = [](const step_schedule& s, const std::string& text) { CHECK(describe(verify(s)) == text); };
  step_schedule s = right;
  move(s, 0, place_of(s, 0, step_op::reduce_copies, 1), place_of(s, 0, step_op::reduce, 1));
  refused(
      s,
      "rank 0, entry 3 (reduction of the copies of unit 1): pieces of a gradient are summed over ranks with the same "
      "pieces before the gradient is reduced; see entry 4 (reduction of unit 1)");
  s = right;
  insert(s, 0, place_of(s, 0, step_op::norm, -1), {step_op::reduce_copies, 1, {}, {}});
  refused(s,
          "rank 0, entry 8 (reduction of the copies of unit 1): pieces of a gradient are summed twice over ranks with "
          "the same pieces; see entry 6 (reduction of the copies of unit 1)");
  s = right;
  move(s, 0, place_of(s, 0, step_op::norm, -1), place_of(s, 0, step_op::reduce_copies, 0));
  refused(s,
          "rank 0, entry 7 (the norm): the norm is taken before a gradient is reduced; see entry 8 (reduction of the "
          "copies of unit 0)");
  s = right;
  erase(s, 0, place_of(s, 0, step_op::reduce_copies, 0));
  refused(
      s,
      "rank 0, reduction of the copies of unit 0: pieces of a gradient are never summed over the ranks with the same "
      "pieces; see entry 7 (the norm)");
  s.policy.clip = false;
  erase(s, 0, place_of(s, 0, step_op::norm, -1));
  refused(s,
          "rank 0, entry 7 (update of unit 0): parameters are updated before their gradient is summed over the ranks "
          "with the same pieces; see entry 5 (reduction of unit 0)");
  s = right;
  s.policy.hybrid = false;
  refused(
      s,
      "rank 0, entry 6 (reduction of the copies of unit 1): pieces of a gradient are summed over ranks with the same "
      "pieces, and the policy has none (hybrid)");
}

TEST_CASE("a norm that one of two ranks lacks is refused") {
  data_parallel unclipped;
  unclipped.clip = false;
  step_schedule s = step_of("1f1b", 2, 4, unclipped, 2);
  REQUIRE(describe(verify(s)) == "ok");
  const int update = place_of(s, 1, step_op::update, 2);
  insert(s, 1, update, {step_op::norm, -1, {}, {}});
  CHECK(describe(verify(s)).find("(the norm): a collective that another rank takes part in is never started there") !=
        std::string::npos);
}

TEST_CASE("a replicated policy gathers nothing") {
  step_schedule s = step_of("gpipe", 1, 1, plain, 2);
  s.programs[0].push_back({step_op::gather, 0, {}, {}});
  CHECK(describe(verify(s)) == "rank 0, entry 9 (gather of unit 0): parameters are gathered that lie gathered");
}

TEST_CASE("two ties between two ranks must be reduced in one order") {
  step_schedule s = step_of("1f1b", 2, 4, plain, 3);
  s.units[0].tied_to = 5, s.units[5].tied_to = 0, s.units[1].tied_to = 4, s.units[4].tied_to = 1;
  const std::string text = describe(verify(s));
  // Rank 0 reduces unit 1 before unit 0, rank 1 unit 5 before unit 4.
  CHECK(text.find("two ranks start the collectives that they share in different orders") != std::string::npos);
  CHECK(text.find("(reduction of unit 1)") != std::string::npos);
  CHECK(text.find("(reduction of unit 5)") != std::string::npos);
  s = expand(parse_schedule("1f1b", 2, 4), s.units, plain);
  CHECK(describe(verify(s)) == "ok");
}

TEST_CASE("peaks of memory, and limits") {
  const step_memory memory{.parameter = 2, .gradient = 4, .data_ranks = 4};
  // Four units of 100: everything gathered, all gradients.
  CHECK(peak_bytes(step_of("gpipe", 1, 1, plain, 4), 0, memory) == 4 * 100 * (2.0 + 4));
  // The first unit's backward pass: it is gathered, three lie in parts, and all gradients are there.
  CHECK(peak_bytes(step_of("gpipe", 1, 1, zero3, 4), 0, memory) == 100 * (1 * 2.0 + 3 * 0.5 + 4 * 4.0));
  data_parallel pool = zero3;
  pool.gradient_buffers = 2;
  const step_schedule s = step_of("gpipe", 1, 1, pool, 4);
  CHECK(describe(verify(s)) == "ok");
  // The second unit's: it and the first are gathered, two buffers, and the parts of two reduced gradients.
  CHECK(peak_bytes(s, 0, memory) == 100 * (2 * 2.0 + 2 * 0.5 + 2 * 4.0 + 2 * 1.0));
  step_memory limited = memory;
  limited.most = 1000;
  const std::string text = describe(verify(step_of("gpipe", 1, 1, plain, 4), limited));
  CHECK(text.find("parameters and gradients are over the limit: 1200") != std::string::npos);
}

TEST_CASE("a unit whose parameters two passes use has its gradient buffer from the first to the last") {
  const schedule one = parse_schedule("gpipe", 1, 1);
  std::vector<step_unit> units = units_of(1, 5);
  units[4].uses = 0;  // as a head that is tied to the embedding: both have gradients from the first backward pass on
  for (const zero_level level : {zero_level::gradients, zero_level::parameters}) {
    CHECK_THROWS_WITH_AS(
        expand(one, units, {.level = level, .gradient_buffers = 1}),
        "step: gradient_buffers is 1, but 2 units have gradients at a time that no reduction has begun "
        "to take; legal is 0 and 2 to 4",
        error);
    for (const int buffers : {2, 3, 4}) {
      const step_schedule s = expand(one, units, {.level = level, .gradient_buffers = buffers});
      CHECK(describe(verify(s)) == "ok");
      for (int u = 1; u < 5; ++u)
        CHECK(s.units[static_cast<std::size_t>(u)].gradient_buffer != s.units[0].gradient_buffer);
    }
  }
}

TEST_CASE("knobs that would change nothing, and units that are none, are refused") {
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
  refused({.level = zero_level::optimizer, .gradient_buffers = 2},
          "step: gradient_buffers is 2, but reduced gradients stay whole at this level; legal is 0");
  refused(
      {.level = zero_level::gradients, .gradient_buffers = 2},
      "step: gradient_buffers is 2, but gradients add up over 2 microbatches, so each unit needs a buffer of its own; "
      "legal is 0");
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
  idle({.level = zero_level::gradients, .gradient_buffers = 2}, 2,
       "step: gradient_buffers is 2, but 2 units have gradients, so that nothing is shared; legal is 0 to 1");
  CHECK(verify(step_of("gpipe", 1, 1, {.level = zero_level::gradients, .gradient_buffers = 1}, 2)).ok());
  idle(
      {.level = zero_level::gradients, .overlap = false, .gradient_buffers = 2}, 4,
      "step: gradient_buffers is 2, but 4 units have gradients at a time that no reduction has begun to take; legal is "
      "0");
  std::vector<step_unit> units = units_of(2, 2);
  std::swap(units.front(), units.back());
  CHECK_THROWS_WITH_AS(expand(parse_schedule("1f1b", 2, 4), units, plain),
                       "step: unit 1 is of stage 0; units stand in the order of stages 0 to 1", error);
  units = units_of(2, 2);
  units[0].tied_to = 3;
  CHECK_THROWS_WITH_AS(expand(parse_schedule("1f1b", 2, 4), units, plain),
                       "step: unit 0 is tied to 3, which must be another unit that is tied to it", error);
}

namespace {

step_costs costs_of(const step_schedule& s, double bandwidth, int data_ranks = 2) {
  step_costs costs;
  costs.units.assign(s.units.size(), action_times{});
  costs.data_ranks = data_ranks;
  costs.bandwidth = bandwidth;
  costs.gather_bytes = costs.reduce_bytes = 1;
  return costs;
}

}  // namespace

TEST_CASE("a step without communication takes what its pipeline takes") {
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
    }
}

TEST_CASE("reductions hide behind the backward pass, as far as the link allows") {
  // Four units of 100, forward 1 and backward 2 each: 12 in all. An all-reduce over 2 ranks sends 100 bytes.
  data_parallel late;
  late.overlap = false;
  const step_schedule s = step_of("gpipe", 1, 1, plain, 4), without = step_of("gpipe", 1, 1, late, 4);
  const step_simulation fast = simulate(s, costs_of(s, 100));  // each takes 1, and only the last is seen
  CHECK(fast.period == doctest::Approx(13));
  CHECK(fast.hidden_share() == doctest::Approx(0.75));
  CHECK(fast.waited(0, step_op::norm) == doctest::Approx(1));
  CHECK(simulate(without, costs_of(without, 100)).period == doctest::Approx(16));
  CHECK(simulate(without, costs_of(without, 100)).hidden_share() == doctest::Approx(0));
  // Each takes 4: the first is through 4 after its pass, and the others queue behind it.
  const step_simulation slow = simulate(s, costs_of(s, 25));
  CHECK(slow.period == doctest::Approx(4 + 2 + 4 * 4));
  CHECK(slow.hidden_share() == doctest::Approx(6.0 / 16));
}

TEST_CASE("with the norm of the step before, updates hide the last reductions") {
  data_parallel delayed;
  delayed.delayed_norm = true;
  const step_schedule exact = step_of("gpipe", 1, 1, plain, 4), early = step_of("gpipe", 1, 1, delayed, 4);
  step_costs costs = costs_of(exact, 50);  // each reduction takes 2, as a backward pass does, and an update takes 1
  costs.updates.assign(4, 1.0);
  const step_simulation all_wait = simulate(exact, costs), none_waits = simulate(early, costs);
  CHECK(all_wait.period == doctest::Approx(4 + 8 + 2 + 4));  // the last reduction, and all updates behind it
  CHECK(none_waits.period < all_wait.period - 0.5);
  const auto& program = none_waits.ranks[0];
  double first_update = 1e9, last_reduction = 0;
  for (const timed_entry& e : program) {
    if (e.entry.op == step_op::update) first_update = std::min(first_update, e.start);
    if (e.entry.op == step_op::reduce) last_reduction = std::max(last_reduction, e.end);
  }
  CHECK(first_update < last_reduction);  // even before it begins
}

TEST_CASE("gathers after updates hide behind the next forward pass, and prefetched ones behind passes") {
  // ZeRO 1 over 2 ranks: each reduction and each gather sends 50 bytes.
  const step_schedule one = step_of("gpipe", 1, 1, zero1, 4);
  const step_simulation first = simulate(one, costs_of(one, 50));  // each takes 1, as a forward pass of a unit does
  CHECK(first.period == doctest::Approx(12 + 1 + 1));              // the last reduction, the first gather
  // ZeRO 3, a use ahead: the first gather is seen, and the last reduction.
  const step_schedule three = step_of("gpipe", 1, 1, zero3, 4);
  const step_simulation ahead = simulate(three, costs_of(three, 50));
  CHECK(ahead.waited(0, step_op::pass) == doctest::Approx(1));
  data_parallel none = zero3;
  none.prefetch = 0;
  const step_schedule behind = step_of("gpipe", 1, 1, none, 4);
  CHECK(simulate(behind, costs_of(behind, 50)).period > ahead.period + 3);
  CHECK(simulate(behind, costs_of(behind, 50)).hidden_share() < ahead.hidden_share());
}

TEST_CASE("the copies of a hybrid hide behind the backward pass") {
  // Four units of 100 over 2 x 2 ranks: a reduction sends 50 bytes, that of its copies as many, each in 1 where it is
  // alone on the link. Reductions begin at 6, 8, 10 and 12, and from the second on with the copies of the one before,
  // until 10, 12 and 14; the last copies are seen until 15, and then the first gather.
  data_parallel policy{.level = zero_level::gradients, .hybrid = true};
  const step_schedule s = step_of("gpipe", 1, 1, policy, 4);
  step_costs costs = costs_of(s, 50);
  costs.copy_ranks = 2;
  const step_simulation hidden = simulate(s, costs);
  CHECK(hidden.period == doctest::Approx(12 + 3 + 1));
  CHECK(hidden.link_busy[0] == doctest::Approx(4 + 4 + 4));
  // One after the other behind the backward pass, as if nothing started them before: the last reduction until 13.
  step_schedule late = s;
  std::vector<step_entry> copies;
  for (const step_entry& e : s.programs[0])
    if (e.op == step_op::reduce_copies) copies.push_back(e);
  for (const step_entry& e : copies) {
    erase(late, 0, place_of(late, 0, step_op::reduce_copies, e.unit));
    insert(late, 0, place_of(late, 0, step_op::norm, -1), e);
  }
  CHECK(describe(verify(late)) == "ok");
  CHECK(simulate(late, costs).period == doctest::Approx(13 + 4 + 1));
  costs.copy_ranks = 1;  // nothing to send, but still in order
  CHECK(simulate(s, costs).link_busy[0] == doctest::Approx(4 + 4));
  costs = costs_of(step_of("gpipe", 1, 1, zero1, 4), 50);
  costs.copy_ranks = 2;
  CHECK_THROWS_WITH_AS(simulate(step_of("gpipe", 1, 1, zero1, 4), costs),
                       "step_costs: copy_ranks is 2, but the policy is no hybrid; legal is 1", error);
}

TEST_CASE("a gather and a reduction share the link") {
  // During unit 1's backward pass, the reduction of unit 2 and the gather of unit 0 are both on their way.
  const step_schedule s = step_of("gpipe", 1, 1, zero3, 3);
  const step_simulation alone = simulate(s, costs_of(s, 50)), half = simulate(s, costs_of(s, 25));
  CHECK(half.link_busy[0] == doctest::Approx(2 * alone.link_busy[0]));
  // All bytes: 5 gathers (the last unit is kept from its forward to its backward pass) and 3 reductions, of 50 each.
  CHECK(alone.link_busy[0] == doctest::Approx(8));
  CHECK(half.period > alone.period);
}

TEST_CASE("tied stages exchange their gradient once both have reduced it, and nothing goes on meanwhile") {
  // Two stages of a unit each, forward 1 and backward 2: F at 0 to 1 and 1 to 2, B at 2 to 4 on rank 1 and 4 to 6 on
  // rank 0. A reduction sends 100 bytes, in 1: rank 1's is over at 5, and rank 0's, which its rank waits for, at 7.
  step_schedule s = step_of("gpipe", 2, 1, plain, 1, true);
  step_costs costs = costs_of(s, 100);
  costs.updates.assign(2, 0.5);
  CHECK(simulate(s, costs).period == doctest::Approx(7.5));
  CHECK(simulate(s, costs).ties[0].empty());
  costs.ties.assign(2, 3.0);
  const step_simulation exact = simulate(s, costs);
  CHECK(exact.period == doctest::Approx(7 + 3 + 0.5));
  CHECK(exact.waited(0, step_op::norm) == doctest::Approx(1 + 3));
  CHECK(exact.waited(1, step_op::norm) == doctest::Approx(6));  // from 4 on
  for (const auto& mine : exact.ties) {
    REQUIRE(mine.size() == 1);
    CHECK(mine[0].start == doctest::Approx(7));
    CHECK(mine[0].end == doctest::Approx(10));
  }
  CHECK(exact.hidden_share() == doctest::Approx(0));  // of the data axes' communication, which a tie is not
  const pipeline_timeline drawn = timeline_of(s, costs, "tied");
  CHECK(std::count_if(drawn.beside[1].begin(), drawn.beside[1].end(), [](const timed_entry& e) {
          return e.entry.op == step_op::reduce && e.end - e.start == doctest::Approx(3);
        }) == 1);

  // With the norm of the step before it is the update that waits: also without clipping, where there is no norm.
  data_parallel delayed;
  delayed.delayed_norm = true;
  const step_schedule early = step_of("gpipe", 2, 1, delayed, 1, true);
  CHECK(simulate(early, costs).waited(1, step_op::update) == doctest::Approx(6));
  CHECK(simulate(early, costs).period == doctest::Approx(7 + 3 + 0.5));
  data_parallel unclipped;
  unclipped.clip = false;
  CHECK(simulate(step_of("gpipe", 2, 1, unclipped, 1, true), costs).period == doctest::Approx(7 + 3 + 0.5));

  costs.ties = {3.0, 4.0};
  CHECK_THROWS_WITH_AS(simulate(s, costs),
                       "step_costs: ties is 3 of unit 0 and 4 of unit 1, which exchange with each other; give both the "
                       "same",
                       error);
  costs.ties = {3.0};
  CHECK_THROWS_WITH_AS(simulate(s, costs), "step_costs: ties has not one entry per unit", error);
}

TEST_CASE("a pass waits for the gathers of all the units that it uses") {
  // ZeRO 3 without prefetch: two units, of which the last uses the first's parameters too; each gather takes 1.
  data_parallel none = zero3;
  none.prefetch = 0;
  const schedule one = parse_schedule("gpipe", 1, 1);
  std::vector<step_unit> units = units_of(1, 2);
  units[1].uses = 0;
  const step_schedule s = expand(one, units, none);
  const step_simulation times = simulate(s, costs_of(s, 50));
  for (const timed_entry& e : times.ranks[0])
    if (e.entry.op == step_op::pass && e.entry.unit == 1 && e.entry.pass.kind == action_kind::forward)
      CHECK(e.waited == doctest::Approx(2));  // both gathers start where it would
}
