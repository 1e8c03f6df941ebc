// bench_schedule [--ranks P] [--microbatches M] [--chunks V] [--rounds N]
//
// Measures the cost of a schedule at run time, in milliseconds of the processor, the least of N rounds: making and
// verifying it by name, verifying it, simulating it, deriving every rank's program, and searching one automatically.
#include <cstdio>

#include "plait/schedule/parse.hpp"
#include "timing.hpp"

int main(int argc, char** argv) try {
  const bench::numbers given(argc, argv);
  given.only({"--ranks", "--microbatches", "--chunks", "--rounds"});
  const int p = static_cast<int>(given.of("--ranks", 16)), m = static_cast<int>(given.of("--microbatches", 128)),
            v = static_cast<int>(given.of("--chunks", 4));
  const auto rounds = given.of("--rounds", 5);
  const auto ms = [&](auto&& work) {
    std::vector<double> times;
    for (std::int64_t i = 0; i < rounds; ++i) times.push_back(1e3 * bench::processor_seconds(work));
    return bench::least(times);
  };
  std::printf("%d ranks, %d microbatches\n%-16s %9s %9s %9s %9s %9s\n", p, m, "schedule", "actions", "parse", "verify",
              "simulate", "program");
  std::size_t kept = 0;  // uses the results, so that the compiler removes no work
  for (const std::string& name : {std::string("1f1b"), "interleaved:" + std::to_string(v), std::string("zb_h2"),
                                  std::string("zb_v"), std::string("dualpipe_v")}) {
    plait::schedule s;
    const double parse = ms([&] { s = plait::parse_schedule(name, p, m); });
    const double verify = ms([&] { kept += plait::verify(s).ok() ? 1u : 0u; });
    const double simulate = ms([&] { kept += plait::simulate(s).transfers.size(); });
    const double program = ms([&] { kept += plait::rank_program(s).size(); });
    std::size_t actions = 0;
    for (const auto& order : s.order) actions += order.size();
    std::printf("%-16s %9zu %9.2f %9.2f %9.2f %9.2f\n", name.c_str(), actions, parse, verify, simulate, program);
  }
  plait::schedule_costs costs;
  costs.rank_part = {1, 1.7, 1, 0.7};
  costs.link = 0.05;
  for (int chunks : {1, 2}) {
    const plait::pipeline_shape shape{
        .ranks = p,
        .chunks = chunks,
        .microbatches = m,
        .placement = chunks == 2 ? plait::stage_placement::vee : plait::stage_placement::straight};
    plait::schedule s;
    const double time = 1e3 * bench::processor_seconds([&] { s = plait::automatic(shape, costs); });
    std::printf("automatic:%d      %.0f ms, %.2f %% idle\n", chunks, time,
                100 * plait::simulate(s, costs).makespan_idle());
  }
  return kept == 0;
} catch (const plait::error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
