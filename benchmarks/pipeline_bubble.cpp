// Compares the measured bubble of pipeline schedules with the simulated one, and measures the executor's cost for each
// action. Stages sleep instead of computing, so ranks do not slow each other down if there are fewer cores.
//
//   bench_pipeline_bubble [--unit MICROSECONDS] [--rounds N]
#include <fmt/format.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "timing.hpp"

using namespace plait;

namespace {

struct number {
  using value_type = double;
  buffer<cpu> memory;
  number() = default;
  explicit number(const context<cpu>& ctx) : memory(make_buffer<double>(ctx.device, 1)) { *data() = 0; }
  double* data() { return memory.data<double>(); }
  std::int64_t size() const { return memory.empty() ? 0 : 1; }
  explicit operator bool() const { return !memory.empty(); }
};

/// Sleeps for the costs of passes. If one sleep is too long, the next ones are shorter, so that their sum is right.
struct sleeper {
  using activation = number;
  using gradient = number;
  struct saved {};
  using clock = std::chrono::steady_clock;

  const pipeline_shape& shape;
  int rank;
  std::chrono::duration<double> unit;  ///< zero: nothing sleeps

  void work(double units) {
    if (unit.count() == 0) return;
    const auto until = clock::now() + std::chrono::duration_cast<clock::duration>(unit * units / shape.chunks);
    std::this_thread::sleep_until(until - std::chrono::microseconds(100));
    while (clock::now() < until) std::this_thread::yield();
  }
  number input(const context<cpu>& ctx, int) { return number(ctx); }
  number output_gradient(const context<cpu>& ctx, int) { return number(ctx); }
  number forward(const context<cpu>& ctx, int chunk, int, number, saved*) {
    work(1);
    return shape.stage_of(rank, chunk) + 1 < shape.stages() ? number(ctx) : number();
  }
  number backward(const context<cpu>& ctx, int chunk, int, saved&, number, weight_work* deferred) {
    work(deferred ? 1 : 2);
    if (deferred) deferred->add([this] { work(1); });
    return shape.stage_of(rank, chunk) > 0 ? number(ctx) : number();
  }
};

/// Returns the seconds from the first start to the last end over all ranks.
double makespan(const schedule& plan, std::chrono::duration<double> unit) {
  std::vector<double> begin(static_cast<std::size_t>(plan.shape.ranks)), end = begin;
  mesh_shape whole;
  whole.add(axis_of<pp>, plan.shape.ranks);
  threads::run(plan.shape.ranks, [&](threads::communicator c) {
    pipeline_world ranks(whole, any_communicator(c));
    cpu device;
    context<cpu> ctx{device, ranks.stage(), {}, 1};
    step_executor<cpu> executor(ranks.along(), plan);
    sleeper stages{plan.shape, c.rank(), unit};
    ranks.root().barrier();
    begin[static_cast<std::size_t>(c.rank())] = comm_clock();
    executor.run(ctx, stages);
    end[static_cast<std::size_t>(c.rank())] = comm_clock();
  });
  return *std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end());
}

template <class Policy>
void compare(int ranks, int microbatches, std::chrono::duration<double> unit, std::int64_t rounds) {
  const schedule plan = make_schedule<Policy>(ranks, microbatches);
  const simulation times = simulate(plan);
  std::vector<double> measured;
  for (std::int64_t i = 0; i < rounds; ++i) measured.push_back(makespan(plan, unit) / unit.count());
  const double best = bench::least(measured), busy = 3.0 * microbatches;
  fmt::print("{:14} {:5} {:5} {:10.1f} {:10.1f} {:10.4f} {:10.4f} {:8.2f} %\n", plan.name.view(), ranks, microbatches,
             times.makespan, best, times.makespan_idle(), 1 - busy / best, 100 * (best / times.makespan - 1));
}

/// Returns the processor microseconds of the executor and the communicator for one action and its messages.
template <class Policy>
void bookkeeping(int ranks, int microbatches) {
  const schedule plan = make_schedule<Policy>(ranks, microbatches);
  std::vector<double> cost(static_cast<std::size_t>(ranks));
  mesh_shape whole;
  whole.add(axis_of<pp>, ranks);
  threads::run(ranks, [&](threads::communicator c) {
    pipeline_world all(whole, any_communicator(c));
    cpu device;
    context<cpu> ctx{device, all.stage(), {}, 1};
    step_executor<cpu> executor(all.along(), plan);
    sleeper stages{plan.shape, c.rank(), {}};
    std::vector<double> times;
    for (int i = 0; i < 20; ++i) times.push_back(bench::processor_seconds([&] { executor.run(ctx, stages); }));
    cost[static_cast<std::size_t>(c.rank())] = bench::least(times) / static_cast<double>(plan.order[0].size());
  });
  fmt::print("{:14} {:5} {:5} {:10.3f}\n", plan.name.view(), ranks, microbatches,
             1e6 * *std::max_element(cost.begin(), cost.end()));
}

}  // namespace

int main(int argc, char** argv) {
  const bench::numbers given(argc, argv);
  const std::chrono::duration<double> unit(1e-6 * static_cast<double>(given.of("--unit", 8000)));
  const std::int64_t rounds = given.of("--rounds", 3);
  fmt::print("unit of work: {:.1f} ms; makespans in units; idle: the share of all ranks' time\n", 1e3 * unit.count());
  fmt::print("{:14} {:>5} {:>5} {:>10} {:>10} {:>10} {:>10} {:>10}\n", "schedule", "p", "m", "simulated", "measured",
             "idle sim.", "idle meas.", "longer by");
  for (const auto& [ranks, microbatches] : {std::pair{4, 8}, {8, 16}}) {
    compare<gpipe>(ranks, microbatches, unit, rounds);
    compare<one_f_one_b>(ranks, microbatches, unit, rounds);
    compare<interleaved<2>>(ranks, microbatches, unit, rounds);
    compare<zb_h1>(ranks, microbatches, unit, rounds);
    compare<zb_h2>(ranks, microbatches, unit, rounds);
    compare<zb_v>(ranks, microbatches, unit, rounds);
    compare<dualpipe_v>(ranks, microbatches, unit, rounds);
  }
  fmt::print("\nprocessor time per action, with nothing to compute (target: below 1 us without messages)\n");
  fmt::print("{:14} {:>5} {:>5} {:>10}\n", "schedule", "p", "m", "us");
  bookkeeping<one_f_one_b>(1, 256);
  bookkeeping<interleaved<4>>(1, 64);
  bookkeeping<one_f_one_b>(2, 256);
  bookkeeping<zb_v>(2, 256);
}
