// program: schedules
// Sends that must have arrived by the schedule: an action has its input only if they arrived, and no earlier action
// shows it.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "plait/schedule/expand.hpp"
#include "plait/schedule/generators.hpp"
#include "plait/schedule/verify.hpp"

using namespace plait;

namespace {

using programs_type = std::vector<std::vector<step_entry>>;

/// The number of entries that `rank` completes if the message `lost` never arrives.
std::size_t reach_without(const pipeline_shape& shape, const programs_type& programs, const transfer& lost, int rank) {
  std::vector<std::size_t> next(programs.size(), 0);
  std::vector<transfer> sent;
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < programs.size(); ++r)
      for (; next[r] < programs[r].size(); ++next[r], moved = true) {
        const step_entry& step = programs[r][next[r]];
        transfer t;
        if (step.op == step_op::pass && detail::input_of(shape, static_cast<int>(r), step.pass, t) &&
            std::find(sent.begin(), sent.end(), t) == sent.end())
          break;
        if (step.op == step_op::send && !(step.transfer == lost)) sent.push_back(step.transfer);
      }
  }
  return next[static_cast<std::size_t>(rank)];
}

template <class Policy>
void check(int ranks, int microbatches) {
  const schedule plan = make_schedule<Policy>(ranks, microbatches);
  CAPTURE(plan.name.str());
  CAPTURE(ranks);
  const programs_type programs = rank_program(plan);
  for (int rank = 0; rank < ranks; ++rank) {
    const auto& mine = programs[static_cast<std::size_t>(rank)];
    const auto arrived = arrived_sends(plan.shape, programs, rank);
    REQUIRE(arrived.size() == mine.size());
    std::vector<std::size_t> where;  // of each send; the end: never
    for (const step_entry& step : mine)
      if (step.op == step_op::send) where.push_back(mine.size());
    for (std::size_t i = 0; i < arrived.size(); ++i)
      for (const std::size_t send : arrived[i]) {
        REQUIRE(send < where.size());
        CHECK(where[send] == mine.size());
        where[send] = i;
      }
    std::size_t send = 0;
    for (const step_entry& step : mine)
      if (step.op == step_op::send) CHECK(where[send++] == reach_without(plan.shape, programs, step.transfer, rank));
  }
}

}  // namespace

TEST_CASE("a send has arrived when the rank could not have continued without it, and not before") {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    check<gpipe>(ranks, 4);
    check<one_f_one_b>(ranks, 2 * ranks);
    check<zb_h1>(ranks, 2 * ranks);
    check<interleaved<2>>(ranks, 2 * ranks);
    check<zb_v>(ranks, 2 * ranks);
    check<dualpipe_v>(ranks, 2 * ranks);
  }
}
