// program: training
// timeout: 300
// A GPU loads the training state that it saved, also between replays of a graph and with optimizer state in host
// memory. Later steps have the same bits.
#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "cuda/parallel/small_training.hpp"
#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "support/temp_folder.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// The results of some steps.
struct outcome {
  std::vector<double> losses;
  std::uint64_t weights = 0;
  friend bool operator==(const outcome&, const outcome&) = default;
};

outcome train(small_run& run, std::int64_t from, std::int64_t to) {
  outcome out;
  for (std::int64_t i = from; i < to; ++i) out.losses.push_back(run.train(i));
  out.weights = weights_hash(run.ctx, run.model);
  return out;
}

}  // namespace

TEST_CASE("a loaded state gives the same bits in the run that saved it, replayed or not, and in another run") {
  scenario s = small_scenario();
  for (const optimizer_options& optimizer : every_optimizer()) {
    s.optimizer = optimizer;
    for (const bool as_graph : {false, true}) {
      const cuda::options device{.offload_optimizer = as_graph};
      const temp_folder folder;
      outcome through;
      on_gpu(
          s, 1, s.batch / s.microbatches,
          [&](const context<cuda>& ctx) {
            small_run run(ctx, s, as_graph);
            train(run, 0, 4);
            checkpoint_saver saver(ctx.device, ctx.ranks.root(), {.directory = folder / "steps"});
            saver.save(ctx, run.model, run.optimizer, 4);  // in flight while the run continues
            through = train(run, 4, 8);
            CHECK(saver.wait(ctx.device).at(0).failure == "");
            CHECK(run.replayed->replaying() == as_graph);
            load_state(ctx, ctx.ranks.root(), run.model, run.optimizer, folder / "steps");
            CHECK(train(run, 4, 8) == through);
          },
          device);
      CHECK(through.losses.front() != through.losses.back());
      on_gpu(s, 1, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
        small_run run(ctx, s, !as_graph);
        load_state(ctx, ctx.ranks.root(), run.model, run.optimizer, folder / "steps");
        CHECK(train(run, 4, 8) == through);
      });
    }
  }
}
