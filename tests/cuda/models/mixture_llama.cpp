// program: training
// A Llama with experts trains on GPUs as on one rank of the CPU.
#include "plait/models/mixture_llama.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/comm/threads/cuda.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

scenario mixture_scenario() {
  scenario s;
  s.config = {.vocab = 29,
              .hidden = 16,
              .layers = 2,
              .heads = 4,
              .kv_heads = 2,
              .head_dim = 8,
              .ffn = 8,
              .initializer_range = 0.3,
              .mixture = {.experts = 8, .router = {.chosen = 3}, .shared_ffn = 8, .shared_gate = true}};
  s.batch = 4, s.seq = 8, s.microbatches = 2;
  s.options.mixture_losses = {.balance = {0.1, balance_over::step}, .z_loss = 0.01};
  return s;
}

/// The losses of three steps.
template <class Device>
std::vector<double> losses_of_mixture(world& ranks, Device& device) {
  const scenario s = mixture_scenario();
  const context<Device> ctx{device, ranks,
                            llama_sizes<megatron_experts>(s.config, ranks.shape(), s.batch / s.microbatches, s.seq), 7};
  mixture_llama<double, megatron_experts, Device> model(ctx, s.config, s.options);
  model.visit([&](auto& p) { p.initialize(ctx); });
  chosen_optimizer<double, Device> optimizer(s.optimizer);
  training_step step(ctx, model, optimizer, s.microbatches, 1.0);
  std::vector<double> losses;
  for (std::int64_t i = 0; i < 3; ++i) {
    step.load(ctx, i * s.batch, [&](std::int64_t m, auto& ids, auto& labels) {
      fill_tokens(s, i * s.batch + m * s.batch / s.microbatches, ids, labels);
    });
    optimizer.begin_step(ctx, 1e-2);
    step.run(ctx);
    losses.push_back(step.result(ctx).loss);
  }
  return losses;
}

}  // namespace

TEST_CASE("a Llama with experts on GPUs") {
  std::vector<double> expected;
  threads::run(1, [&](threads::communicator c) {
    world ranks(megatron_experts::mesh{1, 1, 1, 1, 1}.shape(), c);
    cpu device;
    expected = losses_of_mixture(ranks, device);
  });
  for (const auto& [e, t] : {std::pair{1, 1}, {2, 1}, {2, 2}}) {
    CAPTURE(e * t);
    threads::run(e * t, cuda::options{.workspace_bytes = 4 << 20},
                 [&, e = e, t = t](threads::communicator c, cuda& device) {
                   world ranks(megatron_experts::mesh{1, e, 1, t, 1}.shape(), c);
                   const std::vector<double> losses = losses_of_mixture(ranks, device);
                   for (std::size_t i = 0; i < expected.size(); ++i)
                     CHECK(losses[i] == doctest::Approx(expected[i]).epsilon(1e-10));
                 });
  }
  CHECK(expected[2] < expected[0]);
}
