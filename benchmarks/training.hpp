#pragma once

#include <cstdint>

#include "plait/models/llama.hpp"
#include "plait/parallel/train_step.hpp"

namespace bench {

/// A model that trains on random tokens, each keyed by its sample and position.
template <class Model>
class training {
 public:
  training(plait::context<plait::cpu>& ctx, const plait::llama_config& c, std::int64_t microbatches,
           const plait::llama_options& options = {})
      : ctx_(ctx), model_(ctx, c, options), step_(ctx, model_, optimizer_, microbatches, 1.0), vocab_(c.vocab) {
    plait::initialize(ctx, model_);
  }
  Model& model() { return model_; }
  void step() {
    const auto random = [&](std::int64_t sample, std::int64_t position) {
      const auto key = static_cast<std::uint32_t>(977 * sample + position);
      return static_cast<std::int64_t>((key * 2654435761u >> 7) % static_cast<std::uint32_t>(vocab_));
    };
    step_.load(ctx_, 0, [&](std::int64_t, auto& ids, auto& labels) { ids.fill(random), labels.fill(random); });
    optimizer_.begin_step(ctx_, 1e-4);
    step_.run(ctx_);
  }

 private:
  plait::context<plait::cpu>& ctx_;
  Model model_;
  plait::adamw<typename Model::precision_type> optimizer_;
  plait::training_step<Model> step_;
  std::int64_t vocab_;
};

}  // namespace bench
