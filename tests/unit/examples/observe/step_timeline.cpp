// program: stages
// The measured timeline of a pipeline's step, with every event of every rank, and the timeline simulated from the times
// of its parts.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "support/slow_link.hpp"
#include "support/texts.hpp"
#include "support/widening_stages.hpp"
#include "train_llama/observe/step_events.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("a traced step has every action, collective and message, with arrows from sends to receives") {
  const schedule plan = all_forward_all_backward(2, 2, 3, stage_placement::straight, true);
  mesh_shape whole;
  whole.add(axis_of<dp>, 2);
  whole.add(axis_of<pp>, 2);
  std::vector<std::vector<step_event>> all;
  threads::run(4, [&](threads::communicator c) {
    const auto heard = std::make_shared<recorder>();
    pipeline_world ranks(whole, any_communicator(c), heard);
    cpu device;
    context<cpu> ctx{device, ranks.stage(), {}, 1};
    step_executor<cpu> executor(ranks.along(), plan);
    widening stages(plan.shape, ranks.along().rank());
    std::vector<pipeline_event> events;
    executor.events = &events;
    ranks.root().barrier();
    const double origin = comm_clock();
    executor.run(ctx, stages);
    double sum = 1;
    axis_list over(axis_of<dp>);
    ranks.stage().group(over).all_reduce(&sum, &sum, 1, dtype::f64, reduce_op::sum);
    const auto group = static_cast<std::uint64_t>(whole.coordinate(c.rank(), axis_of<dp>));
    const auto mine = events_of(plan.shape, events, *heard, group, origin);
    auto gathered = gather_records(device, ranks.root(), mine, 0);
    CHECK(gathered.empty() == (c.rank() != 0));
    if (c.rank() == 0) all = std::move(gathered);
  });
  REQUIRE(all.size() == 4);

  const pipeline_timeline measured = timeline_of(plan, {all[0], all[1]}, "measured");
  CHECK(measured.beside.empty());
  for (std::size_t r = 0; r < 2; ++r) {
    REQUIRE(measured.ranks[r].size() == plan.order[r].size());
    for (std::size_t i = 0; i < plan.order[r].size(); ++i) {
      CHECK(measured.ranks[r][i].action == plan.order[r][i]);
      CHECK(measured.ranks[r][i].start >= 0);
      CHECK(measured.ranks[r][i].end >= measured.ranks[r][i].start);
      if (i > 0) CHECK(measured.ranks[r][i].start >= measured.ranks[r][i - 1].end);
    }
  }

  const auto json = nlohmann::json::parse(to_chrome_trace(trace_of(all)));
  std::map<std::uint64_t, std::pair<int, int>> arrows;  // from rank, to rank
  std::map<std::string, int> categories;
  std::uint64_t reduced = 0;
  for (const auto& e : json["traceEvents"]) {
    if (e["ph"] == "s") CHECK(arrows.emplace(e["id"], std::pair{e["pid"].get<int>(), -1}).second);
    if (e["ph"] == "X") ++categories[e["cat"]];
    if (e["ph"] == "X" && e["name"] == "all_reduce") {
      CHECK(e["args"]["axis"] == "dp");
      reduced += e["args"]["bytes"].get<std::uint64_t>();
    }
  }
  for (const auto& e : json["traceEvents"])
    if (e["ph"] == "f") {
      REQUIRE(arrows.count(e["id"]) == 1);
      CHECK(arrows[e["id"]].second == -1);
      arrows[e["id"]].second = e["pid"].get<int>();
    }
  // Each of two pipelines has three borders between stages, crossed by three activations and three gradients each.
  CHECK(arrows.size() == 2 * 3 * 6);
  for (const auto& [id, ends] : arrows) {
    CHECK(ends.second >= 0);
    CHECK(ends.first / 2 == ends.second / 2);  // the same pipeline
    CHECK(ends.first != ends.second);
  }
  CHECK(categories["compute"] == 4 * 2 * 3 * 3);
  CHECK(categories["p2p"] == 2 * 2 * 3 * 6);
  CHECK(categories["collective"] == 4);
  CHECK(reduced == 4 * sizeof(double));
}

TEST_CASE("a whole step is measured, and simulated from the times of its parts") {
  // Stages that sleep for a pass and start reductions that take 60 ms on the link; the norm waits for the reductions.
  struct moving : widening {
    any_communicator& data;
    double sum = 1;
    request on_its_way{};
    moving(const pipeline_shape& s, int r, any_communicator& d) : widening(s, r), data(d) {}

    numbers backward(const context<cpu>& ctx, int chunk, int microbatch, saved& keep, numbers dy, weight_work* later) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      return widening::backward(ctx, chunk, microbatch, keep, std::move(dy), later);
    }
    void perform(const context<cpu>&, const step_entry& e) {
      if (e.op == step_op::reduce) data.start_all_reduce(&sum, &sum, 1, dtype::f64, reduce_op::sum).swap(on_its_way);
      if (e.op == step_op::norm) on_its_way.wait();
      if (e.op == step_op::update) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  const schedule plan = all_forward_all_backward(2, 1, 2, stage_placement::straight, false);
  mesh_shape whole;
  whole.add(axis_of<dp>, 2);
  whole.add(axis_of<pp>, 2);
  std::vector<std::vector<step_event>> all;
  threads::run(4, [&](threads::communicator c) {
    const auto heard = std::make_shared<recorder>();
    const testing::link_time link = [](const call& what, double, double now) {
      return what.kind == collective::all_reduce ? now + 0.06 : now;
    };
    pipeline_world ranks(whole, any_communicator(testing::slow_communicator(c, link)), heard);
    cpu device;
    context<cpu> ctx{device, ranks.stage(), {}, 1};
    step_executor<cpu> executor(ranks.along(), expand(plan, units_of_stages(plan.shape), {}));
    moving stages(plan.shape, ranks.along().rank(), ranks.stage().group(axis_list(axis_of<dp>)));
    std::vector<timed_entry> times;
    std::vector<pipeline_event> events;
    executor.events = &events;
    executor.measured().times = &times;
    ranks.root().barrier();
    const double origin = comm_clock();
    executor.run(ctx, stages);
    const timed_program program{executor.step(), ranks.along().rank(), times};
    const auto group = static_cast<std::uint64_t>(whole.coordinate(c.rank(), axis_of<dp>));
    auto gathered =
        gather_records(device, ranks.root(), events_of(plan.shape, events, *heard, group, origin, &program), 0);
    if (c.rank() == 0) all = std::move(gathered);
    const step_wait longest =
        longest_wait(executor.step(), ranks.along().rank(), executor.measured().waits(), "dp", {"first", "second"});
    CHECK(longest.who == "the norm");
    CHECK(longest.what == (ranks.along().rank() == 0 ? "the reduction of first" : "the reduction of second"));
    CHECK(longest.seconds > 0.005);
  });
  REQUIRE(all.size() == 4);
  const pipeline_timeline measured = timeline_of(plan, {all[0], all[1]}, "measured");
  REQUIRE(measured.beside.size() == 2);
  for (std::size_t r = 0; r < 2; ++r) {
    std::map<step_op, std::vector<timed_entry>> of;
    for (const timed_entry& e : measured.beside[r]) of[e.entry.op].push_back(e);
    CHECK(of[step_op::gather].empty());
    REQUIRE(of[step_op::reduce].size() == 1);
    CHECK(of[step_op::reduce][0].entry.unit == static_cast<int>(r));
    CHECK(of[step_op::reduce][0].end - of[step_op::reduce][0].start >= 60);
    CHECK(of[step_op::reduce][0].start >= measured.ranks[r].back().end - 5);
    REQUIRE(of[step_op::norm].size() == 1);
    CHECK(of[step_op::norm][0].start >= of[step_op::reduce][0].end - 30);  // without the time of waiting
    REQUIRE(of[step_op::update].size() == 1);
    CHECK(of[step_op::update][0].end - of[step_op::update][0].start >= 10);
    CHECK(measured.ranks[r].size() == 4);
  }
  const costed_step parts = measured_step(plan, {}, {{all[0], all[2]}, {all[1], all[3]}}, 2);
  CHECK(parts.step.units.size() == 2);
  CHECK(parts.costs.units[0].backward >= 20);
  CHECK(parts.costs.units[0].forward < parts.costs.units[0].backward);
  CHECK(parts.costs.updates[1] >= 10);
  const pipeline_timeline simulated = timeline_of(parts.step, parts.costs, "simulated", "ms");
  for (std::size_t r = 0; r < 2; ++r)
    for (const timed_entry& e : simulated.beside[r])
      if (e.entry.op == step_op::reduce) {
        CHECK(e.end - e.start >= 60);
        CHECK(e.end - e.start < 1000);
      }
  // Each rank has two backward passes, which follow each other along the pipeline, a reduction and an update.
  CHECK(simulated.end() - simulated.begin() >= 3 * 20 + 60 + 10);
  CHECK(occurrences(to_chrome_trace(trace_of(all)), "\"cat\":\"update\"") == 4 * 2);
}

TEST_CASE("sums of shared parameters are simulated as they were measured") {
  const auto event = [](step_event::kind what, step_op op, int stage, int unit, double begin, double end) {
    step_event e;
    e.what = what, e.op = op;
    e.stage = static_cast<std::int16_t>(stage), e.unit = unit;
    e.begin = begin, e.end = end;
    return e;
  };
  // A stage with `units` units: each pass and each update takes 1 ms, and rank r's reductions take 2 + r ms.
  const auto events = [&](int rank, int stage, int units) {
    std::vector<step_event> all;
    for (int u = 0; u < units; ++u) {
      for (const action_kind kind : {action_kind::forward, action_kind::backward}) {
        all.push_back(event(step_event::kind::part, step_op::pass, stage, u, 0, 1e-3));
        all.back().action.kind = kind;
      }
      all.push_back(event(step_event::kind::update, step_op::update, stage, u, 0, 1e-3));
      all.push_back(event(step_event::kind::collective, step_op::reduce, stage, u, 0, 2e-3 + rank * 1e-3));
      // The last has a norm's weights in addition to the shared parameter.
      all.back().bytes = u == 0 && stage == 0 ? 800 : 808;
    }
    return all;
  };
  const schedule two = all_forward_all_backward(2, 1, 1, stage_placement::straight, false);
  std::vector<std::vector<step_event>> ranks{events(0, 0, 1), events(1, 1, 1)};
  for (int r = 0; r < 2; ++r) {  // rank 1 has waited for rank 0
    step_event tie = event(step_event::kind::collective, step_op::pass, -1, -1, 0, r == 0 ? 5e-3 : 9e-3);
    tie.axis = "pp ends";
    ranks[static_cast<std::size_t>(r)].push_back(tie);
  }
  const costed_step apart = measured_step(two, {}, {{ranks[0]}, {ranks[1]}}, 2, true);
  CHECK(apart.step.units[0].tied_to == 1);
  CHECK(apart.step.units[1].tied_to == 0);
  REQUIRE(apart.costs.ties.size() == 2);
  CHECK(apart.costs.ties[0] == doctest::Approx(5));
  const costed_step untied = measured_step(two, {}, {{ranks[0]}, {ranks[1]}}, 2);
  // The first unit's reduction is assumed to take as long as the last one's, so their times change.
  const double without = simulate(untied.step, untied.costs).period;
  CHECK(simulate(apart.step, apart.costs).period == doctest::Approx(without + 5).epsilon(0.005));

  const schedule one = all_forward_all_backward(1, 1, 1, stage_placement::straight, false);
  const costed_step here = measured_step(one, {}, {{events(0, 0, 2)}}, 2, true);
  CHECK(here.step.units[1].uses == 0);
  CHECK(here.step.units[1].tied_to == -1);
  CHECK(here.costs.ties.empty());
}
