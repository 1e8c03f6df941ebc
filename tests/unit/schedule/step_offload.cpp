// program: schedules
// Steps whose activations are in host memory between their passes: the places of copies, the faults that are refused,
// the memory and the costs.
#include <doctest/doctest.h>

#include <string>
#include <utility>

#include "plait/schedule/verify.hpp"
#include "support/made_steps.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// A step of one microbatch with five units that keep 10 bytes each.
step_schedule five_units(int ahead = 1) {
  step_schedule s = step_of("gpipe", 1, 1, plain, 5);
  for (step_unit& u : s.units) u.kept_bytes = 10;
  return with_offload(std::move(s), ahead);
}

}  // namespace

TEST_CASE("activations leave after their forward pass, and return before their backward pass") {
  const step_schedule s = five_units();
  CHECK(describe(verify(s)) == "ok");
  CHECK(text_of(s.programs[0]) ==
        "F0:0 offload0:0 F0:1 drop0:0 offload0:1 F0:2 drop0:1 offload0:2 F0:3 drop0:2 F0:4 B0:4 reduce4 reload0:2 B0:3 "
        "reduce3 reload0:1 B0:2 reduce2 reload0:0 B0:1 reduce1 B0:0 reduce0 norm update0 update1 update2 update3 "
        "update4");
  CHECK(text_of(five_units(0).programs[0]).find("reload0:2 B0:2") != std::string::npos);
  CHECK_THROWS_WITH_AS(with_offload(s, -1), "step: activations are reloaded -1 passes ahead; legal is 0 or more",
                       error);
  // Several microbatches and stages, in every schedule; the last rank of a pipeline has the shortest time between
  // passes.
  for (const char* name : {"gpipe", "1f1b", "zb_h1", "interleaved:2"})
    for (const int ahead : {0, 1, 2}) {
      const step_schedule all = with_offload(step_of(name, 2, 4, zero3, 2), ahead);
      CAPTURE(name);
      CHECK(describe(verify(all)) == "ok");
      place_of(all, {step_op::reload, 0});
    }
  // A stage of one unit whose backward pass follows at once keeps its activations on the device.
  CHECK(with_offload(step_of("1f1b", 1, 4, plain, 1)).programs == step_of("1f1b", 1, 4, plain, 1).programs);
}

TEST_CASE("faults in the moves of activations are refused, naming both entries") {
  using enum step_op;
  const step_schedule right = five_units();
  check_refused(moved(right, {offload, 0}, 0),
                "rank 0, entry 0 (offload of F0.0 of unit 0): activations are offloaded that no forward pass has kept, "
                "or that a backward pass has used");
  step_schedule s = right;
  s.programs[0].push_back({offload, 4, forward_of(0, 0)});
  CHECK(describe(verify(s)).find("(offload of F0.0 of unit 4): activations are offloaded that no forward pass has "
                                 "kept, or that a backward pass has used; see entry 11 (B0.0 of unit 4)") !=
        std::string::npos);
  for (const action& kept : {forward_of(0, 1), forward_of(1, 0), backward_of(0, 0)}) {
    s = right;
    s.programs[0][1].pass = kept;
    CHECK(verify(s).code == step_error::offload_of_none);
  }
  check_refused(with(right, 2, entry_at(right, {offload, 0})),
                "rank 0, entry 2 (offload of F0.0 of unit 0): activations are offloaded twice; see entry 1 (offload of "
                "F0.0 of unit 0)");
  check_refused(without(right, {offload, 0}),
                "rank 0, entry 2 (drop of F0.0 of unit 0): activations are dropped from the device, and no copy of "
                "them to the host was started; see entry 0 (F0.0 of unit 0)");
  check_refused(moved(right, {drop, 0}, 2),
                "rank 0, entry 2 (drop of F0.0 of unit 0): activations are dropped before the forward pass of the next "
                "unit, which may read them; see entry 1 (offload of F0.0 of unit 0)");
  check_refused(moved(right, {reload, 0}, 3),
                "rank 0, entry 3 (reload of F0.0 of unit 0): activations are reloaded that are on the device; see "
                "entry 1 (offload of F0.0 of unit 0)");
  s = without(right, {reload, 2});
  check_refused(s,
                "rank 0, entry 16 (B0.0 of unit 2): a backward pass reads activations that were dropped and not "
                "reloaded; see entry 9 (drop of F0.0 of unit 2)");
  check_refused(without(s, {drop, 2}),
                "rank 0, entry 15 (B0.0 of unit 2): a backward pass frees activations whose copy to the host was not "
                "waited for; see entry 7 (offload of F0.0 of unit 2)");
}

TEST_CASE("offloaded activations count on the host, and the others on the device") {
  step_schedule here = step_of("gpipe", 1, 1, plain, 5);
  for (step_unit& u : here.units) u.kept_bytes = 10;
  const step_memory memory{.parameter = 0, .gradient = 0};
  CHECK(peak_bytes(here, 0, memory) == 50);
  // One unit's activations leave while the next runs; one's return while the following unit uses its own.
  CHECK(peak_bytes(five_units(), 0, memory) == 20);
  CHECK(peak_host_bytes(five_units(), 0) == 30);
  CHECK(peak_host_bytes(here, 0) == 0);
  CHECK(verify(five_units(), {.parameter = 0, .gradient = 0, .most = 20, .most_on_host = 30}).ok());
  // The first of two ranks has two microbatches on the host. A reloaded copy stays there until its backward pass
  // starts.
  step_schedule two = step_of("1f1b", 2, 3, plain, 5);
  for (step_unit& u : two.units) u.kept_bytes = 10;
  CHECK(peak_host_bytes(with_offload(std::move(two)), 0) == 100);
  CHECK(
      describe(verify(five_units(), {.parameter = 0, .gradient = 0, .most = 19})) ==
      "rank 0, entry 2 (F0.0 of unit 1): parameters, gradients and activations are over the limit: 20 bytes, of which "
      "19 are allowed");
  CHECK(
      describe(verify(five_units(), {.most_on_host = 29})) ==
      "rank 0, entry 7 (offload of F0.0 of unit 2): offloaded activations are over the limit of the host's memory: 30 "
      "bytes, of which 29 are allowed");
}

TEST_CASE("copies take time in parallel with passes, one after the other") {
  const step_schedule s = five_units();
  step_costs costs = costs_of(s, 0, 1);
  CHECK(simulate(s, costs).period == doctest::Approx(15));  // a forward pass takes 1, a backward pass 2
  costs.copy_bandwidth = 10;                                // 1 for each copy: hidden
  const step_simulation hidden = simulate(s, costs);
  CHECK(hidden.period == doctest::Approx(15));
  REQUIRE(hidden.copies[0].size() == 6);
  CHECK(hidden.copies[0][0].start == doctest::Approx(1));
  CHECK(hidden.copies[0][0].end == doctest::Approx(2));
  CHECK(hidden.copies[0][5].entry == step_entry{step_op::reload, 0, forward_of(0, 0)});
  CHECK(hidden.waited(0, step_op::drop) == doctest::Approx(0));
  costs.copy_bandwidth = 2.5;  // 4 for each: drops end at 5, 9 and 13, and the last two passes forward at 10 + 4, 15
  const step_simulation slow = simulate(s, costs);
  CHECK(slow.waited(0, step_op::drop) == doctest::Approx(9));
  // The head's backward pass is from 15 to 17, its neighbour's until 19. Reloads start at 17, 21 and 25, and end 4
  // later.
  CHECK(slow.waited(0, step_op::pass) == doctest::Approx(6));
  CHECK(slow.period == doctest::Approx(15 + 9 + 6));
}
