// Measures the cost of layouts, pipelines and their communication: a training step on a mesh of four axes against the
// same step on one rank, per core. Ranks are threads and more than the cores, so other ranks use the time of a bubble.
// It also times raw products in the shapes of one rank, because smaller products are slower in any program.
//
//   bench_four_axes [--rounds N] [--hidden N] [--layers N] [--seq N] [--microbatches N]
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <thread>
#include <vector>

#include "meshed_llama.hpp"
#include "plait/comm/threads.hpp"
#include "plait/parallel/train_step.hpp"
#include "raw_linears.hpp"
#include "timing.hpp"

using namespace plait;

namespace {

using bench::case_of_run;
using bench::sizes_of_run;

struct speed {
  double rate = 0;       ///< tokens a second of the best step
  double processor = 0;  ///< processor seconds that all ranks together take for a token, in the cheapest step
};

speed measure(const case_of_run& l, const sizes_of_run& s) {
  speed best{0, 1e30};
  const auto tokens = static_cast<double>(s.batch * s.seq);
  threads::run(static_cast<int>(l.shape().size()), [&](threads::communicator comm) {
    bench::trainee<cpu> model(l, s, {}, comm);
    for (std::int64_t i = 0; i <= s.rounds; ++i) {  // the first one warms up
      const auto step = model.step(i);
      if (comm.rank() != 0 || i == 0) continue;
      best.rate = std::max(best.rate, tokens / step.seconds);
      best.processor = std::min(best.processor, step.processor_seconds / tokens);
    }
  });
  return best;
}

/// Returns the FLOPs per processor second of the products of all linears, forward and backward, on a rank with 1/cp of
/// the rows and 1/tp of the heads, of ffn and of the vocabulary.
double rate_of_products(const llama_config& c, std::int64_t rows, std::int64_t cp_ranks, std::int64_t tp_ranks) {
  bench::raw_linears linears(c, rows / cp_ranks, tp_ranks);
  cpu device;
  linears.pass(device);
  std::vector<double> took;
  for (int i = 0; i < 16; ++i) took.push_back(bench::processor_seconds([&] { linears.pass(device); }));
  return linears.flop() / bench::median(took);
}

}  // namespace

int main(int argc, char** argv) try {
  const bench::numbers given(argc, argv);
  const std::int64_t microbatches = given.of("--microbatches", 8);
  const sizes_of_run s = sizes_of_run::of(given, microbatches, microbatches);
  const llama_config& c = s.config;
  const auto cores = static_cast<double>(std::thread::hardware_concurrency());
  fmt::print("hidden {}, {} layers, {} microbatches of {} tokens, {:.0f} cores; target: 0.85 on 8 ranks\n", c.hidden,
             c.layers, microbatches, s.seq, cores);
  fmt::print("{:24} {:>12} {:>10} {:>20}\n", "ranks", "tokens/s", "per core", "per processor second");
  std::optional<speed> one;
  for (const case_of_run& l :
       {case_of_run{1, 1, 1, 1}, {1, 2, 2, 2}, {1, 2, 2, 2, "zb_h1"}, {1, 2, 2, 2, "interleaved:2"}}) {
    const speed now = measure(l, s);
    if (!one) one = now;
    fmt::print("{:24} {:12.0f} {:10.3f} {:20.3f}\n",
               fmt::format("pp={} cp={} tp={} {}", l.pp_ranks, l.cp_ranks, l.tp_ranks, l.schedule), now.rate,
               now.rate / one->rate / std::min(cores, static_cast<double>(l.shape().size())),
               one->processor / now.processor);
  }
  const double whole = rate_of_products(c, s.seq, 1, 1), parts = rate_of_products(c, s.seq, 2, 2);
  fmt::print("products alone, of shapes of cp=2 tp=2: {:.3f} of those of one rank, per processor second\n",
             parts / whole);
} catch (const std::exception& e) {
  fmt::print(stderr, "bench_four_axes: {}\n", e.what());
  return 1;
}
