// program: stages
// The executor alone: stages whose activations have other sizes between other stages, under any order of actions.
#include <doctest/doctest.h>

#include <chrono>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "plait/comm/threads.hpp"
#include "plait/observe/step_timeline.hpp"
#include "plait/observe/step_waits.hpp"
#include "plait/pipeline/pipeline.hpp"
#include "plait/pipeline/world.hpp"
#include "plait/schedule/verify.hpp"
#include "plait/testing/slow_link.hpp"
#include "support/texts.hpp"

using namespace plait;

namespace {

/// What travels: a few numbers in the device's memory.
struct numbers {
  using value_type = double;
  buffer<cpu> memory;
  std::size_t count = 0;

  numbers() = default;
  numbers(const context<cpu>& ctx, std::size_t n) : memory(make_buffer<double>(ctx.device, n)), count(n) {}
  double* data() { return memory.data<double>(); }
  std::int64_t size() const { return static_cast<std::int64_t>(count); }
  explicit operator bool() const { return count > 0; }
};

/// Stage s takes s + 2 numbers and gives s + 3: each output is weight * (sum of inputs) + its index. The first stage
/// makes its input from the microbatch; the loss is the sum of the last output.
struct widening {
  using activation = numbers;
  using gradient = numbers;
  struct saved {
    std::vector<double> x;
  };

  const pipeline_shape& shape;
  int rank;
  std::vector<double> weights;  ///< of each chunk
  std::vector<double> gradients;
  std::vector<int> finished_at;  ///< how many passes each chunk had had when it was finished
  std::vector<int> passes;
  double loss = 0;
  int kept = 0, most_kept = 0;

  widening(const pipeline_shape& s, int r) : shape(s), rank(r) {
    for (int c = 0; c < s.chunks; ++c) weights.push_back(0.5 + 0.1 * s.stage_of(r, c));
    gradients.resize(weights.size());
    finished_at.resize(weights.size(), -1);
    passes.resize(weights.size());
  }
  std::size_t width(int stage) const { return static_cast<std::size_t>(stage) + 2; }
  numbers input(const context<cpu>& ctx, int chunk) { return {ctx, width(shape.stage_of(rank, chunk))}; }
  numbers output_gradient(const context<cpu>& ctx, int chunk) { return {ctx, width(shape.stage_of(rank, chunk) + 1)}; }

  numbers forward(const context<cpu>& ctx, int chunk, int microbatch, numbers x, saved* keep) {
    const int stage = shape.stage_of(rank, chunk);
    if (stage == 0) {
      REQUIRE(!x);
      x = numbers(ctx, width(0));
      for (std::size_t i = 0; i < x.count; ++i) x.data()[i] = microbatch + 0.25 * static_cast<double>(i);
    }
    REQUIRE(x.count == width(stage));
    double sum = 0;
    for (std::size_t i = 0; i < x.count; ++i) sum += x.data()[i];
    numbers y(ctx, width(stage + 1));
    for (std::size_t i = 0; i < y.count; ++i)
      y.data()[i] = weights[static_cast<std::size_t>(chunk)] * sum + static_cast<double>(i);
    if (keep) {
      keep->x.assign(x.data(), x.data() + x.count);
      most_kept = std::max(most_kept, ++kept);
    }
    if (stage + 1 < shape.stages()) return y;
    for (std::size_t i = 0; i < y.count; ++i) loss += y.data()[i];
    return {};
  }
  numbers backward(const context<cpu>& ctx, int chunk, int, saved& keep, numbers dy, weight_work* deferred) {
    const int stage = shape.stage_of(rank, chunk);
    const auto at = static_cast<std::size_t>(chunk);
    double up = 0;
    if (stage + 1 == shape.stages()) {
      REQUIRE(!dy);
      up = static_cast<double>(width(stage + 1));
    } else {
      REQUIRE(dy.count == width(stage + 1));
      for (std::size_t i = 0; i < dy.count; ++i) up += dy.data()[i];
    }
    REQUIRE(keep.x.size() == width(stage));
    microbatch<cpu> mb(ctx);
    mb.deferred = deferred;
    mb.on_weights([this, at, up, &keep] {
      for (double v : keep.x) gradients[at] += up * v;
      ++passes[at];
      --kept;
    });
    if (stage == 0) return {};
    numbers dx(ctx, width(stage));
    for (std::size_t i = 0; i < dx.count; ++i) dx.data()[i] = up * weights[at];
    return dx;
  }
  void perform(const context<cpu>&, const step_entry& e) {
    if (e.op != step_op::reduce) return;
    const int chunk = shape.chunk_of(e.unit);  // each stage is one unit
    REQUIRE(finished_at[static_cast<std::size_t>(chunk)] == -1);
    finished_at[static_cast<std::size_t>(chunk)] = passes[static_cast<std::size_t>(chunk)];
  }
};
static_assert(pipeline_stages<widening, cpu>);

/// Gpipe's order, or with `split` its backward passes in two halves, the weights' after everything else.
schedule all_forward_all_backward(int ranks, int chunks, int microbatches, stage_placement placement, bool split) {
  const pipeline_shape shape{ranks, chunks, microbatches, placement};
  schedule plan = forward_schedule(shape, microbatches);
  for (int wave = 0; wave < microbatches + shape.stages() - 1; ++wave)
    for (int stage = 0; stage < shape.stages(); ++stage) {
      const int microbatch = wave - (shape.stages() - 1 - stage), chunk = shape.chunk_of(stage);
      if (microbatch < 0 || microbatch >= microbatches) continue;
      plan.order[static_cast<std::size_t>(shape.rank_of(stage))].push_back(split ? input_backward_of(chunk, microbatch)
                                                                                 : backward_of(chunk, microbatch));
    }
  for (int stage = 0; split && stage < shape.stages(); ++stage)
    for (int microbatch = microbatches; microbatch-- > 0;)
      plan.order[static_cast<std::size_t>(shape.rank_of(stage))].push_back(
          weight_backward_of(shape.chunk_of(stage), microbatch));
  return plan;
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
  mesh_shape whole;
  whole.add(axis_of<pp>, shape.ranks);
  threads::run(shape.ranks, [&](threads::communicator c) {
    pipeline_world ranks(whole, any_communicator(c));
    cpu device;
    context<cpu> ctx{device, ranks.stage(), {}, 1};
    pipeline_executor<cpu> executor(ranks.along(), expand(plan, units_of_stages(shape), {.clip = false}));
    widening stages(shape, c.rank());
    const auto rank = static_cast<std::size_t>(c.rank());
    executor.events = &all.events[rank];
    for (int again = 0; again < 2; ++again) {  // an executor runs many times
      stages.finished_at.assign(stages.weights.size(), -1);
      stages.passes.assign(stages.weights.size(), 0);
      stages.gradients.assign(stages.weights.size(), 0);
      stages.loss = 0;
      all.events[rank].clear();
      executor.run(ctx, stages);
    }
    CHECK(device.bytes_in_use() == 0);
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      CHECK(stages.finished_at[static_cast<std::size_t>(chunk)] == shape.microbatches);
      all.gradients[static_cast<std::size_t>(shape.stage_of(c.rank(), chunk))] =
          stages.gradients[static_cast<std::size_t>(chunk)];
    }
    CHECK(stages.kept == 0);
    all.most_kept[rank] = stages.most_kept;
    losses[rank] = stages.loss;
  });
  for (double l : losses) all.loss += l;
  return all;
}

}  // namespace

TEST_CASE("every order of actions computes what one rank does, with other sizes between other stages") {
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

TEST_CASE("events are what the program says, with the bytes of every message") {
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

TEST_CASE("a schedule for another number of ranks is refused by name") {
  mesh_shape whole;
  whole.add(axis_of<pp>, 2);
  std::string text;
  threads::run(2, [&](threads::communicator c) {
    pipeline_world ranks(whole, any_communicator(c));
    try {
      pipeline_executor<cpu> executor(ranks.along(),
                                      all_forward_all_backward(3, 1, 4, stage_placement::straight, false));
    } catch (const error& e) {
      if (c.rank() == 0) text = e.what();
    }
  });
  CHECK(text.find("for 3 ranks, and the pipeline axis has 2") != std::string::npos);
}

TEST_CASE("a stage that throws leaves nothing behind") {
  struct failing : widening {
    using widening::widening;
    numbers backward(const context<cpu>&, int, int, saved&, numbers, weight_work*) { fail("a stage fails"); }
  };
  const schedule plan = all_forward_all_backward(1, 1, 2, stage_placement::straight, true);
  mesh_shape whole;
  whole.add(axis_of<pp>, 1);
  threads::run(1, [&](threads::communicator c) {
    pipeline_world ranks(whole, any_communicator(c));
    cpu device;
    context<cpu> ctx{device, ranks.stage(), {}, 1};
    pipeline_executor<cpu> executor(ranks.along(), plan);
    failing stages(plan.shape, 0);
    CHECK_THROWS_AS(executor.run(ctx, stages), error);
    CHECK(device.bytes_in_use() == 0);
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
    pipeline_executor<cpu> executor(ranks.along(), plan);
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
    auto gathered = gather_events(device, ranks.root(), mine);
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
  // Three activations and three gradients cross each of three borders between stages, in each of two pipelines.
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

TEST_CASE("a whole step is measured, and simulated from what its parts took") {
  // Stages that sleep for a pass and start reductions that take 60 ms on the link; the norm waits for them.
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
    pipeline_executor<cpu> executor(ranks.along(), expand(plan, units_of_stages(plan.shape), {}));
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
    auto gathered = gather_events(device, ranks.root(), events_of(plan.shape, events, *heard, group, origin, &program));
    if (c.rank() == 0) all = std::move(gathered);
    const step_wait longest =
        longest_wait(executor.step(), ranks.along().rank(), executor.measured().waits(), "dp", {"first", "second"});
    CHECK(longest.who == "the norm");
    CHECK(longest.what == (ranks.along().rank() == 0 ? "the reduction of first" : "the reduction of second"));
    CHECK(longest.seconds > 0.03);
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
    CHECK(of[step_op::norm][0].start >= of[step_op::reduce][0].end - 30);  // without what it waited
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
  // Two backward passes of each rank, one after the other along the pipeline, a reduction and an update.
  CHECK(simulated.end() - simulated.begin() >= 3 * 20 + 60 + 10);
  CHECK(plait::test::occurrences(to_chrome_trace(trace_of(all)), "\"cat\":\"update\"") == 4 * 2);
}

TEST_CASE("what stages share is simulated as it was measured") {
  const auto event = [](step_event::kind what, step_op op, int stage, int unit, double begin, double end) {
    step_event e;
    e.what = what, e.op = op;
    e.stage = static_cast<std::int16_t>(stage), e.unit = unit;
    e.begin = begin, e.end = end;
    return e;
  };
  // A stage of so many units, from 0 on: each passes and is updated in 1 ms, and rank r's reductions take 2 + r ms.
  const auto events = [&](int rank, int stage, int units) {
    std::vector<step_event> all;
    for (int u = 0; u < units; ++u) {
      for (const action_kind kind : {action_kind::forward, action_kind::backward}) {
        all.push_back(event(step_event::kind::part, step_op::pass, stage, u, 0, 1e-3));
        all.back().action.kind = kind;
      }
      all.push_back(event(step_event::kind::update, step_op::update, stage, u, 0, 1e-3));
      all.push_back(event(step_event::kind::collective, step_op::reduce, stage, u, 0, 2e-3 + rank * 1e-3));
      all.back().bytes = u == 0 && stage == 0 ? 800 : 808;  // the last has a norm's weights beside what is shared
    }
    return all;
  };
  const schedule two = all_forward_all_backward(2, 1, 1, stage_placement::straight, false);
  std::vector<std::vector<step_event>> ranks{events(0, 0, 1), events(1, 1, 1)};
  for (int r = 0; r < 2; ++r) {  // rank 1 has waited for rank 0
    step_event tie = event(step_event::kind::collective, step_op::pass, -1, -1, 0, r == 0 ? 5e-3 : 9e-3);
    tie.along("pp ends");
    ranks[static_cast<std::size_t>(r)].push_back(tie);
  }
  const costed_step apart = measured_step(two, {}, {{ranks[0]}, {ranks[1]}}, 2, true);
  CHECK(apart.step.units[0].tied_to == 1);
  CHECK(apart.step.units[1].tied_to == 0);
  REQUIRE(apart.costs.ties.size() == 2);
  CHECK(apart.costs.ties[0] == doctest::Approx(5));
  const costed_step untied = measured_step(two, {}, {{ranks[0]}, {ranks[1]}}, 2);
  // The first unit's reduction is taken to be as long as the last one's, so that their times are shared out anew.
  const double without = simulate(untied.step, untied.costs).period;
  CHECK(simulate(apart.step, apart.costs).period == doctest::Approx(without + 5).epsilon(0.005));

  const schedule one = all_forward_all_backward(1, 1, 1, stage_placement::straight, false);
  const costed_step here = measured_step(one, {}, {{events(0, 0, 2)}}, 2, true);
  CHECK(here.step.units[1].uses == 0);
  CHECK(here.step.units[1].tied_to == -1);
  CHECK(here.costs.ties.empty());
}
