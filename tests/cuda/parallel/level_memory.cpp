// program: training
// The memory of a rank on a GPU at every level of data parallelism: the peak of a step is as a dry run predicts.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>

#include "cuda/parallel/small_training.hpp"
#include "plait/plan/dry_run.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Compares the peak of the last rank in the second of two steps.
void check_peak(const scenario& s, std::int64_t ranks) {
  on_gpu(s, ranks, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
    small_model model(ctx, s.config, s.options);
    adamw<bf16, cuda> optimizer;
    training_step step(ctx, model, optimizer, s.microbatches, 1.0, s.parallel);
    model.visit([&](auto& p) { p.initialize(ctx); });
    for (std::int64_t i = 0; i < 2; ++i) {
      ctx.device.reset_peak();
      run_step(ctx, step, optimizer, s, i, 1e-3);
      static_cast<void>(step.result(ctx));
      step.model().wait_for_transfers();
    }
    if (ctx.ranks.rank() != ranks - 1) return;
    const auto measured = static_cast<double>(ctx.device.peak_bytes());
    world counted = world::counting(ctx.ranks.shape(), ctx.ranks.rank());
    counting_device counts;
    const context<counting_device> there{counts, counted, ctx.sizes, 1};
    llama<bf16, megatron_sp, counting_device> same(there, s.config, s.options);
    pipeline<llama<bf16, megatron_sp, counting_device>> whole(there, same, static_cast<int>(s.microbatches),
                                                              s.parallel);
    const auto predicted = static_cast<double>(dry_run_step(there, whole).peak_bytes);
    CAPTURE(measured);
    CHECK(std::abs(measured - predicted) <= 0.02 * predicted);
  });
}

}  // namespace

TEST_CASE("a GPU's peak memory is as the dry run predicts, at every level") {
  scenario s = small_scenario();
  s.batch = 8;
  s.config.layers = 3, s.config.hidden = 96, s.config.ffn = 256;
  for (const zero_level level : all_levels) {
    CAPTURE(static_cast<int>(level));
    s.parallel.parallel.level = level;
    check_peak(s, 4);
  }
}
