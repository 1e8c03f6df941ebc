// program: schedules
// All ranks of a mesh must agree on one order of the collectives and messages of a step. Orders that agree are
// accepted; the error for others names both calls.
#include "plait/schedule/order.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

using namespace plait;

namespace {

/// Ranks 0 to 3 as dp=2 x tp=2; the groups of each are tp, dp and all.
posted_program on(int rank) {
  posted_program p;
  const int first = rank / 2 * 2, column = rank % 2;
  p.groups = {{"tp", {first, first + 1}}, {"dp", {column, column + 2}}, {"dp+tp", {0, 1, 2, 3}}};
  p.entries = {{step_op::pass, 0, forward_of(0, 0)},
               {step_op::pass, 1, forward_of(0, 0)},
               {step_op::pass, 1, backward_of(0, 0)},
               {step_op::reduce, 1},
               {step_op::norm}};
  return p;
}
posted_call sum_over(int group, std::uint64_t count, int entry, bool asynchronous = false) {
  return {.group = group,
          .kind = collective::all_reduce,
          .count = count,
          .type = dtype::f32,
          .asynchronous = asynchronous,
          .entry = entry};
}
posted_call message(collective kind, int group, int peer, int tag, int together = -1) {
  return {.group = group, .kind = kind, .count = 8, .type = dtype::f32, .peer = peer, .tag = tag, .together = together};
}

/// A layer's sums over tp in each pass, a gradient's sum over dp in parallel, and the norm over all ranks.
std::vector<posted_program> a_step() {
  std::vector<posted_program> all;
  for (int r = 0; r < 4; ++r) {
    all.push_back(on(r));
    all.back().calls = {sum_over(0, 64, 0), sum_over(0, 64, 1), sum_over(1, 100, 3, true), sum_over(0, 64, 2),
                        sum_over(2, 1, 4)};
  }
  return all;
}
std::vector<posted_call>& calls(std::vector<posted_program>& s, int rank) {
  return s[static_cast<std::size_t>(rank)].calls;
}

}  // namespace

TEST_CASE("a step whose ranks agree has one order") {
  const std::vector<posted_program> s = a_step();
  const order_verdict v = verify_order(s);
  CHECK(describe(v) == "ok");
  CHECK(v.completed == 3 * 2 + 2 + 1);  // tp twice on two groups, dp once on two, the norm once
  CHECK_NOTHROW(require_one_order(s));
}

TEST_CASE("two communicators in opposite orders on two ranks are refused, with and without waits") {
  for (const bool asynchronous : {false, true}) {
    std::vector<posted_program> s = a_step();
    for (posted_program& p : s) p.calls[2].asynchronous = asynchronous;
    std::swap(calls(s, 2)[2], calls(s, 2)[3]);
    CHECK(describe(verify_order(s)) == "ok");  // rank 3 reaches rank 2's call in the end
    std::swap(calls(s, 1)[2], calls(s, 1)[3]);
    CHECK(describe(verify_order(s)) ==
          "rank 0, all_reduce of 100 over dp in reduction of unit 1: 4 ranks wait for each other, which can deadlock; "
          "see rank 1, all_reduce of 64 over tp in B0.0 of unit 1");
  }
  // Only two ranks, which share two communicators.
  std::vector<posted_program> two(2);
  for (posted_program& p : two) {
    p.groups = {{"tp", {0, 1}}, {"tp reductions", {0, 1}}};
    p.entries = on(0).entries;
    p.calls = {sum_over(0, 64, 2), sum_over(1, 100, 3, true)};
  }
  CHECK(describe(verify_order(two)) == "ok");
  std::swap(two[1].calls[0], two[1].calls[1]);
  CHECK(describe(verify_order(two)) ==
        "rank 0, all_reduce of 64 over tp in B0.0 of unit 1: two ranks start what they share in different orders, "
        "which can deadlock; see rank 1, all_reduce of 100 over tp reductions in reduction of unit 1");
  CHECK_THROWS_AS(require_one_order(two), error);
}

TEST_CASE("a layer's collective that one of its ranks does not run is refused, naming each rank's pass") {
  std::vector<posted_program> s = a_step();
  calls(s, 3).erase(calls(s, 3).begin());  // later calls are equal, which must not hide it
  CHECK(describe(verify_order(s)) ==
        "rank 3, all_reduce of 64 over tp in F0.0 of unit 1: it meets another call on this communicator; see rank 2, "
        "all_reduce of 64 over tp in F0.0 of unit 0");
  s = a_step();
  calls(s, 1)[1].count = 32;
  CHECK(describe(verify_order(s)) ==
        "rank 0, all_reduce of 64 over tp in F0.0 of unit 1: it meets another call on this communicator; see rank 1, "
        "all_reduce of 32 over tp in F0.0 of unit 1");
  s = a_step();
  calls(s, 1).pop_back();
  CHECK(describe(verify_order(s)) ==
        "rank 0, all_reduce of 1 over dp+tp in the norm: rank 1 takes part in it, and its step ends without having "
        "started it");
  s = a_step();
  s[2].groups[0].ranks = {0, 1};
  CHECK(describe(verify_order(s)) ==
        "rank 2, all_reduce of 64 over tp in F0.0 of unit 0: the rank is not in this communicator, or its peer is not");
}

TEST_CASE("messages match in their order, and those of a ring do not wait for each other") {
  std::vector<posted_program> ring;
  for (int r = 0; r < 3; ++r) {
    posted_program p;
    p.groups = {{"cp", {0, 1, 2}}};
    p.calls = {message(collective::send, 0, (r + 1) % 3, 0, 0), message(collective::receive, 0, (r + 2) % 3, 0, 0)};
    ring.push_back(p);
  }
  const order_verdict v = verify_order(ring);
  CHECK(describe(v) == "ok");
  CHECK(v.completed == 3);
  for (posted_program& p : ring)
    for (posted_call& c : p.calls) c.together = -1;  // each waits for the next one's receive
  CHECK(describe(verify_order(ring)) ==
        "rank 0, send of 8 over cp to rank 1 outside of the step's entries: 3 ranks wait for each other, which can "
        "deadlock; see rank 2, send of 8 over cp to rank 0 outside of the step's entries");

  std::vector<posted_program> two(2);
  for (int r = 0; r < 2; ++r) {
    two[static_cast<std::size_t>(r)].groups = {{"pp", {0, 1}}};
    const collective kind = r == 0 ? collective::send : collective::receive;
    calls(two, r) = {message(kind, 0, 1 - r, 0), message(kind, 0, 1 - r, 1)};
  }
  CHECK(describe(verify_order(two)) == "ok");
  std::swap(calls(two, 1)[0], calls(two, 1)[1]);
  CHECK(describe(verify_order(two)).find("it meets another call on this communicator; see rank") != std::string::npos);
}
