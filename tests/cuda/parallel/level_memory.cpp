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

struct peaks {
  double measured = 0, predicted = 0;
};

/// Peaks of the last rank, in the second of two steps.
peaks peaks_of(const scenario& s, std::int64_t ranks, const pipeline_options& how) {
  peaks found;
  on_gpu(s, ranks, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
    small_model model(ctx, s.config, s.options);
    adamw<bf16, cuda> optimizer;
    training_step step(ctx, model, optimizer, s.microbatches, 1.0, how);
    model.visit([&](auto& p) { p.initialize(ctx); });
    for (std::int64_t i = 0; i < 2; ++i) {
      ctx.device.reset_peak();
      step.load(ctx, i * s.batch, [&](std::int64_t m, auto& ids, auto& labels) {
        fill_tokens(s, i * s.batch + m * s.batch / s.microbatches, ids, labels);
      });
      optimizer.begin_step(ctx, 1e-3);
      step.run(ctx);
      static_cast<void>(step.result(ctx));
      step.model().wait_for_transfers();
    }
    if (ctx.ranks.rank() != ranks - 1) return;
    found.measured = static_cast<double>(ctx.device.peak_bytes());

    world counted = world::counting(ctx.ranks.shape(), ctx.ranks.rank());
    counting_device counts;
    const context<counting_device> there{counts, counted, ctx.sizes, 1};
    llama<bf16, megatron_sp, counting_device> same(there, s.config, s.options);
    pipeline<llama<bf16, megatron_sp, counting_device>> whole(there, same, static_cast<int>(s.microbatches), how);
    found.predicted = static_cast<double>(dry_run_step(there, whole).peak_bytes);
  });
  return found;
}

}  // namespace

TEST_CASE("a GPU's peak memory is as the dry run predicts, at every level") {
  scenario s = small_scenario();
  s.batch = 8;
  s.config.layers = 3, s.config.hidden = 96, s.config.ffn = 256;
  const std::int64_t ranks = 4;
  for (const zero_level level :
       {zero_level::replicated, zero_level::optimizer, zero_level::gradients, zero_level::parameters}) {
    pipeline_options how;
    how.parallel.level = level;
    const peaks p = peaks_of(s, ranks, how);
    CAPTURE(static_cast<int>(level));
    CAPTURE(p.measured);
    CAPTURE(p.predicted);
    CHECK(std::abs(p.measured - p.predicted) <= 0.02 * p.predicted);
  }
}
