// bench_value_checks [--rounds N] [--hidden H] [--layers L]
//
// Measures the cost of comparing values over ranks: a step of a Llama on dp 2 x tp 2 in-process ranks that compares all
// values, against one that compares none, in turn. Exits with 1 if a checked step takes 1.10 times as long or longer.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/train_step.hpp"
#include "timing.hpp"
#include "training.hpp"

namespace {

using namespace plait;
using S = megatron_sp;

/// Processor seconds of all ranks: [0] of steps that compare no value, [1] of steps that compare all.
struct step_times {
  std::vector<double> of[2];
};

step_times measure(const llama_config& config, std::int64_t rounds) {
  step_times found;
  const S::mesh mesh{2, 1, 2, 1};
  threads::run(4, [&](threads::communicator c) {
    world w(mesh.shape(), c);
    cpu device;
    context<cpu> ctx{device, w, llama_sizes<S>(config, mesh.shape(), 16, 256), 1};
    bench::training<llama<float, S>> model(ctx, config, 1);
    for (std::int64_t i = 0; i < 2 * rounds + 2; ++i) {  // two warm up
      const bool checks = i % 2 != 0;
      w.checks().set(checks ? value_check::always : value_check::off);
      double used = bench::processor_seconds([&] { model.step(); });
      used = all_reduce_scalar(ctx, used, reduce_op::sum);
      if (c.rank() == 0 && i >= 2) found.of[checks].push_back(used);
    }
  });
  return found;
}

}  // namespace

int main(int argc, char** argv) try {
  const bench::numbers given(argc, argv);
  given.only({"--rounds", "--hidden", "--layers"});
  const std::int64_t hidden = given.of("--hidden", 512);
  const llama_config config{.vocab = 4096,
                            .hidden = hidden,
                            .layers = given.of("--layers", 4),
                            .heads = hidden / 64,
                            .kv_heads = hidden / 64,
                            .head_dim = 64,
                            .ffn = hidden * 11 / 4};
  const step_times t = measure(config, given.of("--rounds", 3));
  const double without = bench::median(t.of[0]), with = bench::median(t.of[1]);
  std::printf(
      "hidden %lld, %lld layers, dp 2 x tp 2, 4096 tokens: %.3f s of processors a step, %.3f s where it is checked, "
      "%.3f times as much\n",
      static_cast<long long>(hidden), static_cast<long long>(config.layers), without, with, with / without);
  return with / without < 1.10 ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
