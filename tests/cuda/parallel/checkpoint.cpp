// program: training
// timeout: 300
// A GPU loads the training state that it saved, also between replays of a graph and with optimizer state in host
// memory. Later steps have the same bits.
#include <doctest/doctest.h>

#include <cstdint>
#include <optional>
#include <string>
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

/// A model, its optimizer and their steps.
class small_run {
 public:
  small_run(const context<cuda>& ctx, const scenario& s, bool as_graph)
      : ctx_(ctx), s_(s), as_graph_(as_graph), model_(ctx, s.config, s.options), optimizer_(s.optimizer) {
    model_.visit([&](auto& p) { p.initialize(ctx); });
    step_.emplace(ctx, model_, optimizer_, s.microbatches, 1.0);
    replayed_.emplace(ctx, *step_);
  }
  outcome train(std::int64_t from, std::int64_t to) {
    outcome out;
    for (std::int64_t i = from; i < to; ++i) {
      step_->load(ctx_, i * s_.batch, [&](std::int64_t m, auto& ids, auto& labels) {
        fill_tokens(s_, i * s_.batch + m * s_.batch / s_.microbatches, ids, labels);
      });
      optimizer_.begin_step(ctx_, 1e-3 * static_cast<double>(i + 1));
      if (as_graph_)
        replayed_->run(ctx_);
      else
        step_->run(ctx_);
      out.losses.push_back(step_->result(ctx_).loss);
    }
    out.weights = weights_hash(ctx_, model_);
    return out;
  }
  /// Starts a save, which is in flight while the run continues, until `saved`.
  void save(const std::string& directory, std::uint64_t step) {
    saver_.emplace(ctx_.device, ctx_.ranks.root(), saver_options{.directory = directory});
    saver_->save(ctx_, model_, optimizer_, step);
  }
  void saved() {
    CHECK(saver_->wait(ctx_.device).at(0).failure == "");
    saver_.reset();
  }
  void load(const std::string& directory) { load_state(ctx_, ctx_.ranks.root(), model_, optimizer_, directory); }
  bool replaying() const { return replayed_->replaying(); }

 private:
  const context<cuda>& ctx_;
  const scenario& s_;
  bool as_graph_;
  small_model model_;
  chosen_optimizer<bf16, cuda> optimizer_;
  std::optional<training_step<small_model>> step_;
  std::optional<graph_step<training_step<small_model>>> replayed_;
  std::optional<checkpoint_saver> saver_;
};

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
            run.train(0, 4);
            run.save(folder / "steps", 4);
            through = run.train(4, 8);
            run.saved();
            CHECK(run.replaying() == as_graph);
            run.load(folder / "steps");
            CHECK(run.train(4, 8) == through);
          },
          device);
      CHECK(through.losses.front() != through.losses.back());
      on_gpu(s, 1, s.batch / s.microbatches, [&](const context<cuda>& ctx) {
        small_run run(ctx, s, !as_graph);
        run.load(folder / "steps");
        CHECK(run.train(4, 8) == through);
      });
    }
  }
}
