// program: training
// A Llama with experts trains on GPUs as on one rank of the CPU.
#include "plait/models/mixture_llama.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <tuple>
#include <type_traits>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/comm/threads/cuda.hpp"
#include "plait/parallel/graph_step.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

scenario mixture_scenario() {
  scenario s;
  s.config = {
      .vocab = 29,
      .hidden = 16,
      .layers = 2,
      .heads = 4,
      .kv_heads = 2,
      .head_dim = 8,
      .ffn = 8,
      .initializer_range = 0.3,
      .mixture = {
          .experts = 8, .router = {.chosen = 3}, .correction_bias = true, .shared_ffn = 8, .shared_gate = true}};
  s.batch = 4, s.seq = 8, s.microbatches = 2;
  s.options.mixture_losses = {.balance = {0.1, balance_over::step}, .z_loss = 0.01};
  s.options.expert_limit = 1.5, s.options.expert_bias_rate = 0.01;
  return s;
}

constexpr std::int64_t steps = 5;

/// The losses of some steps. `run(ctx, step)` runs one.
template <class Device, class Run>
std::vector<double> losses_of_mixture(world& ranks, Device& device, bool padded, Run&& run) {
  scenario s = mixture_scenario();
  s.options.padded_experts = padded;
  const context<Device> ctx{device, ranks,
                            llama_sizes<megatron_experts>(s.config, ranks.shape(), s.batch / s.microbatches, s.seq), 7};
  mixture_llama<double, megatron_experts, Device> model(ctx, s.config, s.options);
  model.visit([&](auto& p) { p.initialize(ctx); });
  chosen_optimizer<double, Device> optimizer(s.optimizer);
  training_step step(ctx, model, optimizer, s.microbatches, 1.0);
  std::vector<double> losses;
  for (std::int64_t i = 0; i < steps; ++i) {
    step.load(ctx, i * s.batch, [&](std::int64_t m, auto& ids, auto& labels) {
      fill_tokens(s, i * s.batch + m * s.batch / s.microbatches, ids, labels);
    });
    optimizer.begin_step(ctx, 1e-2);
    run(ctx, step);
    losses.push_back(step.result(ctx).loss);
  }
  return losses;
}

template <class Device>
std::vector<double> losses_of_mixture(world& ranks, Device& device, bool padded) {
  return losses_of_mixture(ranks, device, padded, [](const auto& ctx, auto& step) { step.run(ctx); });
}
std::vector<double> losses_of_one_cpu() {
  std::vector<double> losses;
  threads::run(1, [&](threads::communicator c) {
    world ranks(megatron_experts::mesh{1, 1, 1, 1, 1}.shape(), c);
    cpu device;
    losses = losses_of_mixture(ranks, device, false);
  });
  return losses;
}
void check_losses(const std::vector<double>& got, const std::vector<double>& expected) {
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(got[i] == doctest::Approx(expected[i]).epsilon(1e-10));
}

}  // namespace

TEST_CASE("a Llama with experts on GPUs") {
  const std::vector<double> expected = losses_of_one_cpu();
  CHECK(expected.back() < expected.front());
  for (const auto& [e, t, padded] :
       {std::tuple{1, 1, false}, {2, 1, false}, {2, 2, false}, {2, 1, true}, {2, 2, true}}) {
    CAPTURE(e * t);
    CAPTURE(padded);
    threads::run(e * t, cuda::options{.workspace_bytes = 4 << 20},
                 [&, e = e, t = t, padded = padded](threads::communicator c, cuda& device) {
                   world ranks(megatron_experts::mesh{1, e, 1, t, 1}.shape(), c);
                   check_losses(losses_of_mixture(ranks, device, padded), expected);
                 });
  }
}

TEST_CASE("a step with padded experts is replayed as a graph; with counted rows it cannot be recorded") {
  const auto run = [](bool padded) {
    std::vector<double> losses;
    threads::run(1, cuda::options{.workspace_bytes = 4 << 20}, [&](threads::communicator c, cuda& device) {
      world ranks(megatron_experts::mesh{1, 1, 1, 1, 1}.shape(), c);
      std::shared_ptr<void> owner;
      bool replaying = false;
      losses = losses_of_mixture(ranks, device, padded, [&](const auto& ctx, auto& step) {
        using replayed = graph_step<std::remove_reference_t<decltype(step)>>;
        if (!owner) owner = std::make_shared<replayed>(ctx, step);
        auto& graph = *static_cast<replayed*>(owner.get());
        graph.run(ctx);
        replaying = graph.replaying();
      });
      CHECK(replaying);
    });
    return losses;
  };
  check_losses(run(true), losses_of_one_cpu());
  CHECK_THROWS_WITH_AS(
      run(false),
      doctest::Contains("model.layers.0.mlp: a pass waits for the counts of experts' rows, which a graph "
                        "cannot record; legal is moe_options::padded = true"),
      plait::error);
}
