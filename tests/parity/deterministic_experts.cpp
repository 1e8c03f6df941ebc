// timeout: 300
// program: mixtures
// A Llama with experts has one hash of its losses and weights under deterministic sums. Meshes are dp x ep x cp x tp,
// at each ZeRO level; experts are split over tp or whole on its ranks.
#include <doctest/doctest.h>

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/train_step.hpp"

using namespace plait;

namespace {

struct layout_of_run {
  std::int64_t dp = 1, ep = 1, cp = 1, tp = 1, microbatches = 1;
  zero_level level = zero_level::replicated;
};
constexpr layout_of_run alone{};

/// The hashes of the weights after three steps and of the losses.
using outcome = std::pair<std::uint64_t, std::uint64_t>;

/// Three steps of a small Llama whose router has biases, auxiliary losses and a limit.
template <class T, class S>
outcome train(const layout_of_run& l, balance_over over = balance_over::sequence) {
  const typename S::mesh mesh{l.dp, l.ep, l.cp, l.tp, 1};
  llama_config config{.vocab = 61, .hidden = 32, .layers = 2, .heads = 8, .kv_heads = 4, .head_dim = 4, .ffn = 16};
  config.mixture = {.experts = 8, .router = {.chosen = 3}, .shared_ffn = 16, .shared_gate = true};
  config.mixture.router.scores = kernels::expert_scores::sigmoid, config.mixture.correction_bias = true;
  const llama_options how{
      .mixture_losses = {.balance = {0.1, over}, .z_loss = 0.01}, .expert_limit = 1.25, .expert_bias_rate = 0.05};
  outcome made{};
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator ranks) {
    world w(mesh.shape(), any_communicator(ranks));
    w.checks().set(value_check::always);
    cpu device({.deterministic = true});
    const deterministic_leaves order = leaves_under<S>({4, 8, 8}, mesh.shape());
    const std::int64_t batch = 8 / l.microbatches;
    const context<cpu> ctx{device, w, llama_sizes<S>(config, mesh.shape(), batch, 32, order), 1, order};
    mixture_llama<T, S> model(ctx, config, how);
    model.visit([&](auto& p) { p.initialize(ctx); });
    adamw<T> optimizer;
    pipeline_options options;
    options.parallel.level = l.level;
    training_step step(ctx, model, optimizer, l.microbatches, /*clip=*/0.1, options);
    std::uint64_t losses = 0;
    for (std::int64_t i = 0; i < 3; ++i) {
      step.load(ctx, i * 8, [&](std::int64_t m, host_tokens& ids, host_tokens& labels) {
        const box& part = ids.stored_part();
        const std::int64_t first =
            first_sample_in_step(order, m, l.microbatches, part.global[0], part.offset[0], part.local[0]);
        for (std::int64_t row = 0; row < part.local[0]; ++row)
          for (std::int64_t column = 0; column < part.local[1]; ++column) {
            const std::int64_t sample = i * 8 + first + row, at = part.offset[1] + column;
            const auto token = [&](std::int64_t p) { return (sample * 7919 + p * p * 31 + p) % 61; };
            ids.data()[row * part.local[1] + column] = token(at);
            labels.data()[row * part.local[1] + column] = token(at + 1);
          }
      });
      optimizer.begin_step(ctx, 1e-2);
      step.run(ctx);
      const step_result result = step.result(ctx);
      CHECK(result.auxiliary > 0);
      for (const double x : {result.loss, result.auxiliary, result.gradient_norm})
        losses = losses * 1099511628211u + std::bit_cast<std::uint64_t>(x);
    }
    const std::uint64_t weights = weights_hash(ctx, step.model());
    if (w.rank() == 0) made = {weights, losses};
  });
  return made;
}

}  // namespace

TEST_CASE("one hash on all meshes of up to 16 ranks, with experts sharded over tp, and with whole ones") {
  const outcome one = train<float, megatron_experts>(alone);
  CHECK(train<float, megatron_experts>({1, 1, 1, 1, 4}) == one);
  int meshes = 0;
  for (const std::int64_t d : {1, 2, 4})
    for (const std::int64_t e : {1, 2, 4, 8})
      for (const std::int64_t c : {1, 2, 4})
        for (const std::int64_t t : {1, 2, 4}) {
          if (d * e * c * t > 16 || d * e > 8 || c * t > 8) continue;
          layout_of_run l{d, e, c, t, meshes % 2 == 1 && d * e <= 4 ? 2 : 1};
          if (d * e * c > 1) l.level = static_cast<zero_level>(meshes % 4);
          INFO(d, " x ", e, " x ", c, " x ", t);
          CHECK(train<float, megatron_experts>(l) == one);
          ++meshes;
        }
  CHECK(meshes >= 40);
  using whole_experts = experts_over_tp<megatron_experts>;
  for (const layout_of_run& l : {layout_of_run{1, 2, 1, 2}, {1, 1, 2, 4, 2, zero_level::gradients}}) {
    INFO(l.dp, " x ", l.ep, " x ", l.cp, " x ", l.tp, ", whole on the ranks of tp");
    CHECK(train<float, whole_experts>(l) == one);
  }
}

TEST_CASE("one hash on ranks with unequally many experts or leaves") {
  const outcome one = train<float, megatron_experts>(alone);
  for (const layout_of_run& l : {layout_of_run{1, 3, 1, 1, 2},
                                 {1, 5, 1, 1, 1, zero_level::optimizer},
                                 {1, 7, 1, 1, 1, zero_level::parameters},
                                 {2, 3, 1, 1, 1, zero_level::gradients},
                                 {1, 1, 3, 1, 1},
                                 {1, 3, 1, 3, 1}}) {
    INFO(l.dp, " x ", l.ep, " x ", l.cp, " x ", l.tp);
    CHECK(train<float, megatron_experts>(l) == one);
  }
  CHECK(train<float, experts_over_tp<megatron_experts>>({1, 1, 1, 3}) == one);
}

TEST_CASE("a balance over steps, for any number of microbatches") {
  const outcome one = train<float, megatron_experts>(alone, balance_over::step);
  CHECK(train<float, megatron_experts>({1, 4, 1, 1, 2}, balance_over::step) == one);
  CHECK(train<float, megatron_experts>({2, 2, 1, 2, 1, zero_level::parameters}, balance_over::step) == one);
}

TEST_CASE("in bf16") {
  const outcome one = train<bf16, megatron_experts>(alone);
  CHECK(train<bf16, megatron_experts>({1, 2, 1, 2, 2, zero_level::parameters}) == one);
  CHECK(train<bf16, megatron_experts>({1, 4, 2, 1}) == one);
}
