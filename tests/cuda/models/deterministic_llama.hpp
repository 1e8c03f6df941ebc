// Runs a small Llama, dense or with experts, with deterministic sums on one GPU or several. A launcher starts the
// ranks.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>

#include "plait/device/cuda.hpp"
#include "plait/models/llama.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/train_step.hpp"

namespace plait::test {

/// Makes the stand-in's products as different as a library's may be.
struct different_orders {
#ifdef PLAIT_CUDA_STAND_IN
  different_orders() { stand_in::orders_differ = true; }
  ~different_orders() { stand_in::orders_differ = false; }
#else
  different_orders() = default;
  ~different_orders() {}
#endif
  different_orders(const different_orders&) = delete;
  different_orders& operator=(const different_orders&) = delete;
};

using strategy_type = context_parallel<megatron_sp, chosen<cp>, zigzag>;
using mixture_strategy_type = context_parallel<megatron_experts, chosen<cp>, zigzag>;

struct deterministic_layout {
  std::int64_t dp = 1, cp = 1, tp = 1, microbatches = 1;
  zero_level level = zero_level::replicated;
  chosen_policy context = chosen_policy::ring;
  std::int64_t ep = 1;
};

struct deterministic_result {
  std::uint64_t hash = 0;
  double loss = 0, norm = 0;
  friend bool operator==(const deterministic_result&, const deterministic_result&) = default;
};

inline llama_config deterministic_config() {
  llama_config config;
  config.vocab = 64, config.hidden = 64, config.ffn = 128, config.layers = 1, config.heads = 4, config.kv_heads = 2;
  config.head_dim = 16;
  return config;
}

/// Three steps of a small model in bf16 on ranks started by `launch(ranks, device options, body(communicator,
/// device))`.
template <class S, class Model, class Launch>
deterministic_result train_model(const Launch& launch, const mesh_shape& mesh, const llama_config& config,
                                 const llama_options& model_options, const deterministic_layout& l,
                                 bool deterministic) {
  deterministic_result all;
  launch(static_cast<int>(mesh.size()), cuda::options{.deterministic = deterministic}, [&](auto& c, cuda& device) {
    world ranks(mesh, c);
    const deterministic_leaves order = deterministic ? leaves_under<S>({2, 4, 4}, mesh) : deterministic_leaves{};
    const context<cuda> ctx{
        device, ranks, llama_sizes<S>(config, mesh, 4 / l.microbatches, 32, deterministic_leaves{2, 4, 4}), 7, order};
    Model model(ctx, config, model_options);
    model.visit([&](auto& p) { p.initialize(ctx); });
    adamw<bf16, cuda> optimizer;
    pipeline_options options{.parallel = {.level = l.level}};
    training_step step(ctx, model, optimizer, l.microbatches, 0.1, options);
    const sequence_order places = sequence_order_of<S>(mesh, ctx.sizes);
    step_result last;
    for (std::int64_t i = 0; i < 3; ++i) {
      step.load(ctx, i * 4, [&](std::int64_t m, host_tokens& ids, host_tokens& labels) {
        const box& part = ids.stored_part();
        const std::int64_t first =
            first_sample_in_step(order, m, l.microbatches, part.global[0], part.offset[0], part.local[0]);
        for (std::int64_t t = 0; t < ids.size(); ++t) {
          const std::int64_t sample = i * 4 + first + t / part.local[1];
          const std::int64_t at = places.position(part.offset[1] + t % part.local[1]);
          ids.data()[t] = (sample * 7919 + at * at * 31 + at) % 64;
          labels.data()[t] = (sample * 7919 + (at + 1) * (at + 1) * 31 + at + 1) % 64;
        }
      });
      optimizer.begin_step(ctx, 1e-2);
      step.run(ctx);
      last = step.result(ctx);
    }
    const std::uint64_t hash = weights_hash(ctx, step.model());
    if (ranks.rank() == 0) all = {hash, last.loss, last.gradient_norm};
  });
  return all;
}

template <class Launch>
deterministic_result train_deterministic(const Launch& launch, const deterministic_layout& l,
                                         bool deterministic = true) {
  const strategy_type::mesh mesh{l.dp, l.cp, l.tp, 1};
  return train_model<strategy_type, llama<bf16, strategy_type, cuda>>(
      launch, mesh.shape(), deterministic_config(), {.attention = {.context = l.context}}, l, deterministic);
}

/// A model with eight experts and a shared one, auxiliary losses and a limit of rows.
template <class Launch>
deterministic_result train_deterministic_mixture(const Launch& launch, const deterministic_layout& l,
                                                 bool deterministic = true) {
  const mixture_strategy_type::mesh mesh{l.dp, l.ep, l.cp, l.tp, 1};
  llama_config config = deterministic_config();
  config.mixture = {.experts = 8, .router = {.chosen = 3}, .shared_ffn = 64};
  return train_model<mixture_strategy_type, mixture_llama<bf16, mixture_strategy_type, cuda>>(
      launch, mesh.shape(), config,
      {.attention = {.context = l.context}, .mixture_losses = {.balance = {0.1}, .z_loss = 0.01}, .expert_limit = 1.5},
      l, deterministic);
}

}  // namespace plait::test
