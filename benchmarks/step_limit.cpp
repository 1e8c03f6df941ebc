// bench_step_limit [--computing-us T --bytes-per-second B]
//
// Simulates the shortest step that the order of a data-parallel step schedule allows. The model is bench-512 on two
// ranks, with sequences of 256 and one microbatch. Passes take T microseconds together, without gaps, and the link has
// B bytes a second each way. Prints the seconds of each level of ZeRO, with and without overlap. Without T and B it
// prints the longer of computing and sending over the step's time, for ratios of the two from a half to four.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "plait/models/llama_stages.hpp"
#include "plait/schedule/expand.hpp"
#include "plait/schedule/generators.hpp"
#include "plait/schedule/simulate.hpp"
#include "plait/schedule/verify.hpp"
#include "timing.hpp"

namespace {

using namespace plait;

constexpr int ranks = 2;

struct shape {
  std::vector<step_unit> units;  ///< with parameters in float
  std::vector<action_times> flops;
};

shape bench_512() {
  llama_config config;
  for (const llama_preset& p : llama_presets)
    if (p.name == "bench-512") config = p.config;
  const llama_part_times parts = llama_part_flops(config, 256);
  llama_config shorter = config;
  --shorter.layers;
  const std::int64_t layer = parameter_count(config) - parameter_count(shorter), table = config.vocab * config.hidden;
  shape s{{{.parameters = table}}, {parts.embedding}};
  for (std::int64_t i = 0; i < config.layers; ++i) {
    s.units.push_back({.parameters = layer});
    s.flops.push_back(parts.layer);
  }
  s.units.push_back({.parameters = table + config.hidden});
  s.flops.push_back(parts.head);
  return s;
}

step_schedule program_of(const shape& s, const data_parallel& policy) {
  step_schedule program = expand(make_schedule<one_f_one_b>(1, 1), s.units, policy);
  require_verified(program);
  return program;
}

step_costs costs_of(const shape& s, double computing, double bandwidth) {
  double flops = 0;
  for (const action_times& t : s.flops) flops += t.forward + t.backward;
  step_costs costs;
  for (action_times t : s.flops) {
    for (double* part : {&t.forward, &t.backward, &t.input_backward, &t.weight_backward}) *part *= computing / flops;
    costs.units.push_back(t);
  }
  costs.data_ranks = ranks;
  costs.gather_bytes = costs.reduce_bytes = sizeof(float);
  costs.bandwidth = bandwidth;
  return costs;
}

/// Returns the seconds of a step whose passes take `computing` seconds.
double step_seconds(const shape& s, const data_parallel& policy, double computing, double bandwidth) {
  return simulate(program_of(s, policy), costs_of(s, computing, bandwidth)).period;
}

/// Returns the bytes that a rank sends, and also receives, in a step.
double bytes(const shape& s, const data_parallel& policy) {
  const step_schedule program = program_of(s, policy);
  const step_costs costs = costs_of(s, 1, 1);
  double sum = 0;
  for (const step_entry& e : program.programs.at(0))
    if (e.op == step_op::gather || e.op == step_op::reduce) sum += wire_bytes(program, costs, e.op, e.unit);
  return sum;
}

struct row {
  const char* name;
  data_parallel policy;
};
constexpr row rows[] = {
    {"replicated --overlap off", {.level = zero_level::replicated, .overlap = false}},
    {"replicated", {.level = zero_level::replicated}},
    {"zero1 --overlap off", {.level = zero_level::optimizer, .overlap = false}},
    {"zero1", {.level = zero_level::optimizer}},
    {"zero2", {.level = zero_level::gradients}},
    {"zero3", {.level = zero_level::parameters}},
};

}  // namespace

int main(int argc, char** argv) try {
  const bench::numbers given(argc, argv);
  given.only({"--computing-us", "--bytes-per-second"});
  const std::int64_t computing = given.of("--computing-us", 0), bandwidth = given.of("--bytes-per-second", 0);
  if ((computing == 0) != (bandwidth == 0))
    fail("--computing-us and --bytes-per-second are given together, or neither is");
  const shape s = bench_512();
  if (computing > 0) {
    for (const row& r : rows)
      std::printf("%-28s %.4f\n", r.name,
                  step_seconds(s, r.policy, 1e-6 * static_cast<double>(computing), static_cast<double>(bandwidth)));
    return 0;
  }
  constexpr double ratios[] = {0.5, 1, 2, 4};
  std::printf(
      "bench-512 on two ranks: the share of the longer of computing and sending that the order of a step allows\n");
  std::printf("%-28s", "computing over sending");
  for (const double ratio : ratios) std::printf(" %7.1f", ratio);
  for (const row& r : rows) {
    std::printf("\n%-28s", r.name);
    for (const double ratio : ratios)  // sending takes a second
      std::printf(" %7.3f", std::max(ratio, 1.0) / step_seconds(s, r.policy, ratio, bytes(s, r.policy)));
  }
  std::printf("\n");
  return 0;
} catch (const std::exception& e) {
  std::fprintf(stderr, "bench_step_limit: %s\n", e.what());
  return 2;
}
