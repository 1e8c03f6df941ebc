#include <benchmark/benchmark.h>

#include <cstdint>

#include "plait/plan/hardware.hpp"
#include "plan_llama/planner/llama_shape.hpp"
#include "plan_llama/planner/search.hpp"
#include "plan_llama/planner/step_on_links.hpp"

/// Measures the planner on one thread: pricing a layout, simulating its pipeline, and searching all layouts of Llama 3
/// 405B. Targets: 50 microseconds for a layout, a second for the search on 16384 accelerators. A simulated step on
/// shared links with varying passes: 2 s for 16384 ranks, and 20 s for 100,000.
namespace {

namespace pp = plait::planner;

pp::training_job large_job(std::int64_t batch) {
  pp::training_job job;
  job.model = *plait::find_large_llama("llama-3-405b");
  job.seq = 8192;
  job.global_batch = batch;
  return job;
}

void price_a_layout(benchmark::State& state) {
  const pp::hardware h = pp::hardware_called("h100", "hardware");
  const pp::training_job job = large_job(2048);
  const pp::training_layout l = pp::parse_layout("tp=8,cp=2,pp=16,dp=64,schedule=interleaved:4", "layout");
  for (auto _ : state) benchmark::DoNotOptimize(pp::price(h, job, l).step());
}

void simulate_a_layout(benchmark::State& state) {
  const pp::hardware h = pp::hardware_called("h100", "hardware");
  const pp::training_job job = large_job(2048);
  const pp::layout_price p =
      pp::price(h, job, pp::parse_layout("tp=8,cp=2,pp=16,dp=64,schedule=interleaved:4", "layout"));
  for (auto _ : state) benchmark::DoNotOptimize(pp::simulated_seconds(h, job, p));
}

void search_405b(benchmark::State& state) {
  const pp::hardware h = pp::hardware_called("h100", "hardware");
  const pp::training_job job = large_job(2048);
  std::int64_t candidates = 0;
  for (auto _ : state) candidates = pp::search_layouts(h, job, state.range(0)).candidates;
  state.counters["candidates"] = static_cast<double>(candidates);
}

/// Simulates every replica of the pipeline with different times of passes, on links that two accelerators share. A
/// stage on ranks of tp and cp takes the slowest of their draws.
void step_on_shared_links(benchmark::State& state) {
  pp::hardware h = pp::hardware_called("h100", "hardware");
  h.levels.back().shared_by = 2;
  const std::int64_t dp = state.range(0) / (8 * 16);
  const pp::training_job job = large_job(dp * 16);
  pp::training_layout l = pp::parse_layout("tp=8,pp=16,schedule=interleaved:4", "layout");
  l.dp = dp;
  const pp::layout_price p = pp::price(h, job, l);
  for (auto _ : state) benchmark::DoNotOptimize(pp::step_on_links(h, job, p, {.jitter = 0.02}, dp));
}

BENCHMARK(price_a_layout)->Unit(benchmark::kMicrosecond);
BENCHMARK(simulate_a_layout)->Unit(benchmark::kMillisecond);
BENCHMARK(search_405b)->Arg(1024)->Arg(16384)->Unit(benchmark::kMillisecond);
BENCHMARK(step_on_shared_links)->Arg(16384)->Arg(100096)->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
