// program: stages
// The executor with stages whose activations have different sizes between stages, under any order of actions.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/verify.hpp"
#include "support/slow_link.hpp"
#include "support/texts.hpp"
#include "support/widening_stages.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Runs work(ctx, along) on each rank of a pipeline. With `link`, a message takes the time that it gives.
template <class Work>
void on_pipeline(int ranks, const Work& work, const testing::link_time& link = {}) {
  mesh_shape whole;
  whole.add(axis_of<pp>, ranks);
  threads::run(ranks, [&](threads::communicator c) {
    pipeline_world here(whole, link ? any_communicator(testing::slow_communicator(c, link)) : any_communicator(c));
    cpu device;
    work(context<cpu>{device, here.stage(), {}, 1}, here.along());
  });
}

struct result {
  std::vector<double> gradients;  ///< by stage
  double loss = 0;
  std::vector<int> most_kept;  ///< by rank
  std::vector<std::vector<pipeline_event>> events;
};

result run(const schedule& plan) {
  const pipeline_shape& shape = plan.shape;
  result all;
  all.gradients.resize(static_cast<std::size_t>(shape.stages()));
  all.most_kept.resize(static_cast<std::size_t>(shape.ranks));
  all.events.resize(static_cast<std::size_t>(shape.ranks));
  std::vector<double> losses(static_cast<std::size_t>(shape.ranks));
  // MPI guarantees tags up to 32767: each message from one rank to another has its own tag, and there are no more tags.
  const testing::link_time look_at_tags = [&](const call& what, double, double now) {
    if (what.kind == collective::send) CHECK(what.tag < shape.chunks * shape.microbatches);
    return now;
  };
  const auto work = [&](const context<cpu>& ctx, const any_communicator& along) {
    step_executor<cpu> executor(along, expand(plan, units_of_stages(shape), {.clip = false}));
    widening stages(shape, along.rank());
    const auto rank = static_cast<std::size_t>(along.rank());
    executor.events = &all.events[rank];
    for (int again = 0; again < 2; ++again) {  // an executor can run several times
      stages.finished_at.assign(stages.weights.size(), -1);
      stages.passes.assign(stages.weights.size(), 0);
      stages.gradients.assign(stages.weights.size(), 0);
      stages.loss = 0;
      all.events[rank].clear();
      executor.run(ctx, stages);
    }
    CHECK(ctx.device.bytes_in_use() == 0);
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      CHECK(stages.finished_at[static_cast<std::size_t>(chunk)] == shape.microbatches);
      all.gradients[static_cast<std::size_t>(shape.stage_of(along.rank(), chunk))] =
          stages.gradients[static_cast<std::size_t>(chunk)];
    }
    CHECK(stages.kept == 0);
    all.most_kept[rank] = stages.most_kept;
    losses[rank] = stages.loss;
  };
  on_pipeline(shape.ranks, work, look_at_tags);
  for (double l : losses) all.loss += l;
  return all;
}

}  // namespace

TEST_CASE("every order of actions has one rank's results, with different sizes between stages") {
  for (const auto& [ranks, chunks] : {std::pair{2, 1}, {3, 1}, {2, 2}, {4, 2}, {2, 3}})
    for (const stage_placement placement : {stage_placement::straight, stage_placement::vee})
      for (const bool split : {false, true})
        for (const int microbatches : {1, 3, 8}) {
          INFO("ranks " << ranks << " chunks " << chunks << " vee " << (placement == stage_placement::vee) << " split "
                        << split << " microbatches " << microbatches);
          const result one =
              run(all_forward_all_backward(1, ranks * chunks, microbatches, stage_placement::straight, false));
          CHECK(one.loss != 0);
          const result many = run(all_forward_all_backward(ranks, chunks, microbatches, placement, split));
          CHECK(many.loss == doctest::Approx(one.loss).epsilon(1e-13));
          REQUIRE(many.gradients.size() == one.gradients.size());
          for (std::size_t s = 0; s < one.gradients.size(); ++s)
            CHECK(many.gradients[s] == doctest::Approx(one.gradients[s]).epsilon(1e-13));
          for (int kept : many.most_kept) CHECK(kept == microbatches * chunks);
        }
}

TEST_CASE("events are those of the program, with the bytes of every message") {
  const schedule plan = all_forward_all_backward(3, 1, 4, stage_placement::straight, false);
  const result r = run(plan);
  for (int rank = 0; rank < 3; ++rank) {
    const auto program = rank_program(plan)[static_cast<std::size_t>(rank)];
    const auto& events = r.events[static_cast<std::size_t>(rank)];
    REQUIRE(events.size() == program.size());
    for (std::size_t i = 0; i < events.size(); ++i) {
      CHECK(events[i].step == program[i]);
      CHECK(events[i].begin <= events[i].end);
      if (program[i].op == step_op::pass) continue;
      // Between stages s and s + 1 there are s + 3 numbers, in both directions.
      const int stage = std::min(program[i].transfer.from_stage, program[i].transfer.to_stage);
      CHECK(events[i].bytes == sizeof(double) * static_cast<std::uint64_t>(stage + 3));
    }
  }
}

TEST_CASE("what is sent is released as the schedule allows: more microbatches need no more memory") {
  const auto most_bytes = [](int microbatches) {
    const schedule plan = make_schedule<one_f_one_b>(2, microbatches);
    std::vector<std::size_t> most(2);
    on_pipeline(2, [&](const context<cpu>& ctx, const any_communicator& along) {
      step_executor<cpu> executor(along, plan);
      executor.release_by_schedule();
      std::vector<pipeline_event> events;
      executor.events = &events;
      widening stages(plan.shape, along.rank());
      executor.run(ctx, stages);
      for (const pipeline_event& e : events) {
        std::size_t& bytes = most[static_cast<std::size_t>(along.rank())];
        bytes = std::max(bytes, e.memory);
      }
    });
    return most;
  };
  CHECK(most_bytes(4)[0] > 0);
  CHECK(most_bytes(16) == most_bytes(4));
}

TEST_CASE("a schedule for another number of ranks is refused by name") {
  std::string text;
  on_pipeline(2, [&](const context<cpu>&, const any_communicator& along) {
    const schedule plan = all_forward_all_backward(3, 1, 4, stage_placement::straight, false);
    const std::string mine = text_thrown_by([&] { step_executor<cpu> executor(along, plan); });
    if (along.rank() == 0) text = mine;
  });
  CHECK(has(text, "for 3 ranks, and the pipeline axis has 2"));
}

TEST_CASE("stages that do not expose their saved values cannot offload them") {
  const schedule plan = all_forward_all_backward(1, 1, 4, stage_placement::straight, false);
  on_pipeline(1, [&](const context<cpu>& ctx, const any_communicator& along) {
    step_executor<cpu> executor(along, with_offload(expand(plan, units_of_stages(plan.shape, false), {.clip = false})));
    widening stages(plan.shape, 0);
    CHECK_THROWS_WITH_AS(executor.run(ctx, stages),
                         "step: offload of F0.0 of unit 0, for which these stages have no member `visit_kept`", error);
  });
}

TEST_CASE("a stage that throws leaves nothing behind") {
  struct failing : widening {
    using widening::widening;
    numbers backward(const context<cpu>&, int, int, saved&, numbers, weight_work*) { fail("a stage fails"); }
  };
  const schedule plan = all_forward_all_backward(1, 1, 2, stage_placement::straight, true);
  on_pipeline(1, [&](const context<cpu>& ctx, const any_communicator& along) {
    step_executor<cpu> executor(along, plan);
    failing stages(plan.shape, 0);
    CHECK_THROWS_AS(executor.run(ctx, stages), error);
    CHECK(ctx.device.bytes_in_use() == 0);
  });
}

TEST_CASE("layers are split so that the most expensive stage costs least") {
  const auto sizes = [](const stage_costs& costs, std::int64_t stages) {
    std::vector<std::int64_t> n;
    std::int64_t next = 0;
    for (const stage_layers& part : split_layers(costs, stages)) {
      CHECK(part.begin == next);
      CHECK(part.first == (n.empty()));
      next = part.end;
      n.push_back(part.size());
    }
    CHECK(next == static_cast<std::int64_t>(costs.layers.size()));
    return n;
  };
  const auto even = [](std::size_t n) { return stage_costs{std::vector<double>(n, 1.0)}; };
  using list = std::vector<std::int64_t>;
  CHECK(sizes(even(8), 4) == list{2, 2, 2, 2});
  CHECK(sizes(even(7), 3) == list{3, 2, 2});
  CHECK(sizes(even(5), 5) == list{1, 1, 1, 1, 1});
  CHECK(sizes({std::vector<double>(8, 1.0), 0, 2}, 2) == list{5, 3});
  CHECK(sizes({std::vector<double>(9, 1.0), 3, 0}, 2) == list{3, 6});
  CHECK(sizes({std::vector<double>(9, 1.0), 1, 2}, 3) == list{3, 4, 2});
  CHECK(sizes({{5, 1, 1, 1, 1, 1}, 0, 0}, 2) == list{1, 5});
  CHECK(sizes({std::vector<double>(4, 0.1), 0.3, 7}, 4) == list{1, 1, 1, 1});
  CHECK_THROWS_WITH_AS(split_layers(even(3), 4), doctest::Contains("3 layers for 4 stages"), error);
  CHECK(split_layers(even(4), 2).back().last);
}
