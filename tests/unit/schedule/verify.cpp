// program: schedules
// Errors of the verifier, and proof that it finds every exchange of two messages.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "plait/schedule/verified.hpp"
#include "support/schedule_runner.hpp"

using namespace plait;

namespace {

using programs = std::vector<std::vector<step_entry>>;

constexpr posting_rule all_rules[] = {posting_rule::blocking, posting_rule::one_queue, posting_rule::global_list};

schedule_error refused_as(const schedule& s, int rank, int position, const verify_options& options = {}) {
  const schedule_verdict v = verify(s, options);
  CAPTURE(describe(v));
  CHECK(v.rank == rank);
  CHECK(v.position == position);
  return v.code;
}

/// `s` with another action at one place.
schedule with(schedule s, int rank, int position, const action& a) {
  s.order[static_cast<std::size_t>(rank)][static_cast<std::size_t>(position)] = a;
  return s;
}

programs programs_of(const schedule& s, posting_rule rule) {
  if (rule == posting_rule::global_list) return rank_program(s);
  return detail::program_in_own_order(s);
}

}  // namespace

TEST_CASE("an incomplete or disordered schedule is refused, naming the wrong action") {
  const schedule good = make_schedule<zb_h1>(3, 4);  // rank 0: F0 F1 F2 I0 W0 F3 I1 W1 ...
  REQUIRE(verify(good).ok());
  schedule s = good;
  s.order[1].erase(s.order[1].begin());
  CHECK(refused_as(s, 1, 1) == schedule_error::backward_before_forward);
  s = good;
  s.order[2].pop_back();
  CHECK(refused_as(s, 2, -1) == schedule_error::backward_missing);
  CHECK(describe(verify(s)) ==
        "rank 2, (W3.0): a backward is missing: each stage needs one B, or one I and one W, of each microbatch");
  CHECK(refused_as(with(good, 0, 3, weight_backward_of(0, 0)), 0, 3) == schedule_error::weight_before_input);
  CHECK(refused_as(with(good, 0, 4, input_backward_of(0, 0)), 0, 4) == schedule_error::done_twice);
  CHECK(refused_as(with(good, 0, 4, backward_of(0, 0)), 0, 4) == schedule_error::two_backwards);
  CHECK(refused_as(with(good, 0, 1, forward_of(1, 1)), 0, 1) == schedule_error::unknown_chunk);
  CHECK(refused_as(with(good, 0, 1, forward_of(0, 4)), 0, 1) == schedule_error::unknown_microbatch);
  s = good;
  std::erase_if(s.order[1], [](const action& a) { return a.microbatch == 3; });
  CHECK(refused_as(s, 1, -1) == schedule_error::forward_missing);
  s = good;
  s.order.pop_back();
  CHECK(refused_as(s, -1, -1) == schedule_error::shape_illegal);
  s = {"none", {.ranks = 0}, {}};
  CHECK(refused_as(s, -1, -1) == schedule_error::shape_illegal);
}

TEST_CASE("invalid sizes are refused before they are multiplied") {
  const int largest = std::numeric_limits<int>::max();
  const schedule good = make_schedule<one_f_one_b>(2, 4);
  for (const pipeline_shape& shape : {pipeline_shape{2, 1, 65536},
                                      {2, 255, 65535},
                                      {2, 256, 1},
                                      {1025, 1, 1},
                                      {2, 1 << 30, 1},
                                      {1024, 128, 32768},  // 2^32
                                      {1 << 16, 1, 1 << 16},
                                      {largest, largest, largest},
                                      {-1, -1, -1},
                                      {2, 1, -4}}) {
    schedule s = good;
    s.shape = shape;
    CHECK(refused_as(s, -1, -1) == schedule_error::shape_illegal);
    CHECK(verify_programs(shape, rank_program(good)).code == schedule_error::shape_illegal);
  }
  CHECK(describe(verify({"none", {.ranks = 1 << 16, .microbatches = 1 << 16}, {}})) ==
        "the shape of a pipeline needs 1 to 1024 ranks, 1 to 255 chunks on each and 1 to 65535 microbatches, of which "
        "the product is at most 4194304, and a schedule has one list of actions for each rank");
  // Large sizes are valid, but almost all actions are missing: the text names a missing one, for each of the rules.
  schedule empty{"empty", {.ranks = 512, .chunks = 2, .microbatches = 4096}, {}};
  empty.order.resize(512);
  for (posting_rule rule : all_rules)
    CHECK(refused_as(empty, 0, -1, {.posting = rule}) == schedule_error::forward_missing);
}

TEST_CASE("a simulation refuses actions that a schedule does not have") {
  const schedule good = make_schedule<interleaved<2>>(2, 4);
  const char* const message =
      "simulate: the schedule names a chunk or a microbatch that it does not have; verify names the action";
  CHECK_THROWS_WITH(simulate(with(good, 1, 3, forward_of(2, 0))), message);
  CHECK_THROWS_WITH(simulate(with(good, 0, 0, forward_of(0, 4))), message);
  schedule s = good;
  s.order.pop_back();
  CHECK_THROWS_WITH(simulate(s), "simulate: the schedule must have one list of actions for each rank");
  CHECK(peak_activations(s) == peak_activations(good, 0));
}

TEST_CASE("ranks that wait for each other are refused, naming the action that the first one waits for") {
  schedule s = make_schedule<one_f_one_b>(2, 2);  // rank 0: F0 F1 B0 B1, rank 1: F0 B0 F1 B1
  std::swap(s.order[0][1], s.order[0][2]);        // F0 B0 F1 B1: valid, and slower
  CHECK(verify(s).ok());
  s.order[1] = {forward_of(0, 1), backward_of(0, 1), forward_of(0, 0), backward_of(0, 0)};
  CHECK(refused_as(s, 0, 1) == schedule_error::never_ready);
  CHECK(describe(verify(s)) ==
        "rank 0, action 1 (B0.0): the schedule cannot finish: ranks wait for each other's actions in a circle; it "
        "waits for rank 1, which is stuck at action 0 (F1.0)");
  CHECK_THROWS_WITH(require_verified(s),
                    "schedule 1f1b (2 ranks, 1 chunks each, 2 microbatches): rank 0, action 1 (B0.0): the schedule "
                    "cannot finish: ranks wait for each other's actions in a circle; it waits for rank 1, which is "
                    "stuck at action 0 (F1.0)");
  CHECK_THROWS_WITH(simulate(s), "simulate: the schedule cannot finish; verify names the action");
}

TEST_CASE("the limit on activations names the excess forward action and a sufficient limit") {
  CHECK(verify(make_schedule<zb_h1>(4, 8), {.max_activations = 4}).ok());
  const schedule_verdict v = verify(make_schedule<zb_h2>(4, 8), {.max_activations = 4});
  CHECK(describe(v) ==
        "rank 0, action 4 (F4.0): a forward would keep more activations than the limit allows; the nearest legal limit "
        "is 7");
  CHECK(verify(make_schedule<dualpipe_v>(4, 8), {.max_activations = 4.5}).ok());
  CHECK(verify(make_schedule<dualpipe_v>(4, 8), {.max_activations = 4.4}).code ==
        schedule_error::over_activation_limit);
}

TEST_CASE("a deadlock names the two messages that wait for each other") {
  const schedule s = make_schedule<one_f_one_b>(2, 3);
  CHECK(
      describe(verify(s, {.posting = posting_rule::one_queue})) ==
      "rank 0, step 3 (send activation 1: stage 0 -> 1): the messages deadlock under this posting rule: ranks wait for "
      "each other's in a circle; it waits for rank 1, which is stuck at step 3 (send gradient 0: stage 1 -> 0)");
  const schedule two = make_schedule<gpipe>(2, 2);
  programs crossed = rank_program(two);
  const auto is_send = [](const step_entry& e) { return e.op == step_op::send; };
  const auto first = std::find_if(crossed[0].begin(), crossed[0].end(), is_send);
  std::rotate(first, first + 1, std::find_if(first + 1, crossed[0].end(), is_send) + 1);  // the first comes second
  CHECK(describe(verify_programs(two.shape, crossed)).find("two ranks expect different messages first") !=
        std::string::npos);
}

TEST_CASE("the schedules that finish under each posting rule") {
  const auto finishes = [](const schedule& s, posting_rule rule) {
    const schedule_verdict v = verify(s, {.posting = rule});
    return v.ok() ? "yes" : v.code == schedule_error::deadlock ? "deadlock" : text_of(v.code);
  };
  for (int p : {2, 3, 4, 8}) {
    const int m = 2 * p;
    CAPTURE(p);
    std::vector<schedule> others{make_schedule<one_f_one_b>(p, m),    make_schedule<zb_h1>(p, m),
                                 make_schedule<zb_h2>(p, m),          make_schedule<interleaved<2>>(p, m),
                                 make_schedule<interleaved<4>>(p, m), make_schedule<zb_v>(p, m),
                                 make_schedule<v_half>(p, m),         make_schedule<v_min>(p, m)};
    if (p > 2) others.push_back(make_schedule<dualpipe_v>(p, m));
    for (posting_rule rule : all_rules) {
      CAPTURE(name_of(rule));
      const std::string expected = rule == posting_rule::global_list ? "yes" : "deadlock";
      CHECK(finishes(make_schedule<gpipe>(p, m), rule) == std::string("yes"));
      for (const schedule& s : others) CHECK(finishes(s, rule) == expected);
    }
  }
}

TEST_CASE("programs finish even when every step blocks: all are sorted by one order of events") {
  for (int p : {2, 3, 4, 8})
    for (const schedule& s :
         {make_schedule<one_f_one_b>(p, 2 * p), make_schedule<interleaved<3>>(p, 2 * p), make_schedule<zb_h2>(p, 2 * p),
          make_schedule<zb_v>(p, 2 * p), make_schedule<dualpipe_v>(p, 2 * p)}) {
      CAPTURE(p);
      CAPTURE(s.name.str());
      for (double link : {0.0, 0.3, 7.0}) {
        schedule_costs costs;
        costs.link = link;
        costs.rank_part = {1.0, 2.3, 1.1, 1.2};
        CHECK(verify_programs(s.shape, rank_program(s, costs), posting_rule::blocking).ok());
        CHECK(verify_programs(s.shape, rank_program(s, costs)).ok());
      }
      // With zero costs only the order matters.
      schedule_costs free;
      free.rank_part = {0, 0, 0, 0};
      CHECK(verify_programs(s.shape, rank_program(s, free), posting_rule::blocking).ok());
    }
}

TEST_CASE("every exchange of two messages is refused, or a run shows that it is harmless") {
  std::mt19937 random(7);
  int refused = 0, harmless = 0;
  for (const schedule& s :
       {make_schedule<one_f_one_b>(2, 3), make_schedule<one_f_one_b>(3, 3), make_schedule<interleaved<2>>(2, 2),
        make_schedule<zb_h1>(3, 3), make_schedule<zb_v>(2, 3), make_schedule<gpipe>(3, 2), make_schedule<gpipe>(4, 4),
        make_schedule<one_f_one_b>(5, 5), make_schedule<zb_h2>(5, 5), make_schedule<interleaved<2>>(4, 4)})
    for (posting_rule rule : all_rules) {
      const programs all = programs_of(s, rule);
      CAPTURE(s.name.str());
      CAPTURE(name_of(rule));
      const bool legal = verify_programs(s.shape, all, rule).ok();
      CHECK(legal == test::runs_right(s.shape, all, rule, random));
      if (!legal) continue;
      for (std::size_t r = 0; r < all.size(); ++r)
        for (std::size_t i = 0; i < all[r].size(); ++i)
          for (std::size_t j = i + 1; j < all[r].size(); ++j) {
            if (all[r][i].op == step_op::pass || all[r][j].op == step_op::pass) continue;
            programs changed = all;
            std::swap(changed[r][i], changed[r][j]);
            const bool accepted = verify_programs(s.shape, changed, rule).ok();
            (accepted ? harmless : refused) += 1;
            if (accepted != test::runs_right(s.shape, changed, rule, random)) {
              CAPTURE(describe(all[r][i]));
              CAPTURE(describe(all[r][j]));
              FAIL_CHECK((accepted ? "accepted, and goes wrong" : "refused, and goes right"));
            }
          }
    }
  MESSAGE(refused << " exchanges refused, " << harmless << " harmless");
  CHECK(refused > 500);
  CHECK(harmless > 50);
}

TEST_CASE("programs with missing, extra or misplaced messages are refused") {
  const schedule s = make_schedule<one_f_one_b>(2, 2);
  const programs good = rank_program(s);
  const auto code = [&](const programs& p) { return verify_programs(s.shape, p).code; };
  const auto find = [&](std::size_t rank, step_op op) {
    return std::find_if(good[rank].begin(), good[rank].end(), [&](const auto& x) { return x.op == op; }) -
           good[rank].begin();
  };
  const auto receive = find(1, step_op::receive), send = find(0, step_op::send);
  REQUIRE(code(good) == schedule_error::ok);
  programs p = good;
  p[1].erase(p[1].begin() + receive);
  CHECK(code(p) == schedule_error::transfer_missing);
  p = good;
  p[0].erase(p[0].begin() + send);
  CHECK(code(p) == schedule_error::transfer_missing);
  p = good;
  p[0].insert(p[0].begin() + send, p[0][static_cast<std::size_t>(send)]);
  CHECK(code(p) == schedule_error::transfer_twice);
  p = good;
  std::rotate(p[0].begin(), p[0].begin() + send, p[0].begin() + send + 1);
  CHECK(code(p) == schedule_error::send_misplaced);
  p = good;
  p[1].push_back({step_op::receive, -1, {}, {transfer_kind::gradient, 1, 0, 0}});
  CHECK(code(p) == schedule_error::receive_misplaced);
  p = good;
  p[1].push_back({step_op::pass, -1, forward_of(1, 0)});
  CHECK(code(p) == schedule_error::unknown_chunk);
  p = good;
  p[0].push_back({step_op::pass, -1, forward_of(0, 2)});
  CHECK(code(p) == schedule_error::unknown_microbatch);
  p = good;
  p.resize(3);
  CHECK(code(p) == schedule_error::shape_illegal);
}
