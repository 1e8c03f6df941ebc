#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/mixture_llama.hpp"
#include "plait/nn/moe/expert_mlp.hpp"
#include "plait/parallel/train_step.hpp"
#include "slow_link.hpp"
#include "timing.hpp"
#include "training.hpp"

/// Compares a training step of a Llama with experts with one of a dense Llama, in turn. The dense MLP is as wide as the
/// experts of a token, so both have the same products for each token. Times are processor times of one thread. Then it
/// compares the memory of a rank whose experts all tokens choose with even choices and with the bound. At last it
/// measures how much of the exchanges over a slow link a shared expert hides.
namespace {

using plait::cpu;
using std::int64_t;

plait::llama_config config_of(int64_t hidden, bool mixture) {
  plait::llama_config c{.vocab = 4096,
                        .hidden = hidden,
                        .layers = 4,
                        .heads = hidden / 64,
                        .kv_heads = hidden / 64,
                        .head_dim = 64,
                        .ffn = 3 * hidden};
  if (mixture) c.ffn /= 2, c.mixture = {.experts = 8, .router = {.chosen = 2}};
  return c;
}

using bench::training;
using mixture = plait::mixture_llama<float, plait::megatron_experts>;

void compare(int64_t hidden, int64_t seq, int64_t rounds) {
  constexpr int64_t sequences = 8, microbatches = 2;
  plait::threads::run(1, [&](plait::threads::communicator ranks) {
    plait::world w(plait::megatron_experts::mesh(1, 1, 1, 1, 1).shape(), ranks);
    cpu device;
    const plait::llama_config with = config_of(hidden, true), without = config_of(hidden, false);
    plait::context<cpu> ctx{device, w, plait::llama_sizes<plait::megatron_experts>(with, w.shape(), sequences, seq), 1};
    plait::context<cpu> dense_ctx{device, w,
                                  plait::llama_sizes<plait::megatron_experts>(without, w.shape(), sequences, seq), 1};
    training<mixture> experts(ctx, with, microbatches);
    training<plait::llama<float, plait::megatron_experts>> dense(dense_ctx, without, microbatches);
    experts.step(), dense.step();
    std::vector<double> of_experts, of_dense;
    for (int64_t i = 0; i < rounds; ++i) {
      of_dense.push_back(bench::processor_seconds([&] { dense.step(); }));
      of_experts.push_back(bench::processor_seconds([&] { experts.step(); }));
    }
    fmt::print(
        "hidden {:4}, {} x {} x {} tokens, 2 of 8 experts: a step takes {:.3f} s at best and {:.3f} s dense, "
        "ratio {:.3f}, of medians {:.3f}\n",
        hidden, microbatches, sequences, seq, bench::least(of_experts), bench::least(of_dense),
        bench::least(of_experts) / bench::least(of_dense), bench::median(of_experts) / bench::median(of_dense));
    std::fflush(stdout);
  });
}

/// Returns the peak bytes in a step of four ranks of experts, of the rank with the most. With `skewed`, all scores are
/// equal, so all tokens choose the first two experts.
std::size_t peak_of(bool skewed) {
  constexpr int64_t ranks = 4;
  std::vector<std::size_t> peaks(ranks);
  plait::threads::run(ranks, [&](plait::threads::communicator all) {
    plait::world w(plait::megatron_experts::mesh(1, ranks, 1, 1, 1).shape(), all);
    cpu device;
    plait::context<cpu> ctx{device, w,
                            plait::llama_sizes<plait::megatron_experts>(config_of(256, true), w.shape(), 8, 256), 1};
    training<mixture> experts(ctx, config_of(256, true), 1);
    if (skewed)
      experts.model().visit([&](auto& p) {
        if (p.name().ends_with("mlp.gate.weight"))
          p.fill_values(ctx, [&](float* v) { std::fill(v, v + p.size(), 0.0f); });
      });
    const std::size_t before = device.bytes_in_use();
    device.reset_peak();
    experts.step();
    peaks[static_cast<std::size_t>(all.rank())] = device.peak_bytes() - before;
  });
  return *std::max_element(peaks.begin(), peaks.end());
}

/// Measures how much of the exchanges of rows between two ranks a shared expert hides. It is as wide as the experts of
/// a token, and an exchange takes half of its time in a pass. It runs while rows travel to experts. Nothing hides their
/// way back.
void hide_exchanges(int64_t hidden, int64_t rounds) {
  plait::llama_config c = config_of(hidden, true);
  c.mixture.shared_ffn = 2 * c.ffn;
  bench::link link;
  plait::threads::run(2, [&](plait::threads::communicator comm) {
    plait::world w(plait::megatron_experts::mesh(1, 2, 1, 1, 1).shape(),
                   plait::any_communicator(bench::slow_link<plait::threads::communicator>(comm, &link)));
    cpu device;
    plait::context<cpu> ctx{device, w, plait::llama_sizes<plait::megatron_experts>(c, w.shape(), 8, 256), 1};
    using layer = plait::expert_mlp<float, plait::megatron_experts>;
    layer experts(ctx, "mlp", {.router = c.mixture.router, .init = {0, 0.02}}, true, {.init = {0, 0.02}});
    plait::shared_expert<float, plait::megatron_experts> alone(ctx, "alone", {.init = {0, 0.02}});
    const auto make_values = [&](auto& p) { p.initialize(ctx), p.gather(ctx), p.zero_gradient(ctx); };
    experts.visit(make_values), alone.visit(make_values);
    plait::tensor<float, layer::input> x(ctx);
    plait::tensor<float, plait::dual_t<layer::output>> dy(ctx);
    plait::kernels::fill_normal(device, x.data(), x.part(), 1, 0, 0.0, 1.0);
    plait::kernels::fill_normal(device, dy.data(), dy.part(), 2, 0, 0.0, 1.0);
    const plait::microbatch<cpu> mb(ctx);
    const auto pass = [&](auto& of) {
      typename std::remove_reference_t<decltype(of)>::saved kept;
      of.forward(mb, x, &kept);
      of.backward(mb, x, kept, dy);
    };
    plait::any_communicator& all = w.root();
    /// Returns the seconds that a rank waits for the link in a pass.
    const auto waits = [&](double seconds_per_byte, bool overlaps) {
      all.barrier();
      if (w.rank() == 0) link.seconds_per_byte = seconds_per_byte, link.overlaps = overlaps, link.waited = 0;
      all.barrier();
      pass(experts);
      all.barrier();
      return link.waited / 2;
    };
    pass(experts), pass(alone);
    std::vector<double> of_shared, waiting, overlapping;
    for (int64_t i = 0; i < rounds; ++i) of_shared.push_back(bench::seconds([&] { pass(alone); }));
    double message = bench::least(of_shared) / 6;  // half of a forward pass, which is a third of both passes
    all.broadcast(&message, 1, plait::dtype::f64, 0);
    const double bytes = static_cast<double>(x.size() / hidden * c.mixture.router.chosen * hidden) / 2 * sizeof(float);
    for (int64_t i = 0; i < rounds; ++i) {
      waiting.push_back(waits(message / bytes, false));
      overlapping.push_back(waits(message / bytes, true));
    }
    if (w.rank() != 0) return;
    const double four = bench::least(waiting), left = bench::least(overlapping);
    fmt::print(
        "2 ranks of experts, an exchange takes {:.1f} ms on the link: a rank waits {:.1f} ms for the four of a pass, "
        "and {:.1f} ms with a shared expert beside the two to the experts, which hides {:.0f} % of those two\n",
        message * 1e3, four * 1e3, left * 1e3, 100 * (four - left) / (four / 2));
  });
}

}  // namespace

int main(int argc, char** argv) try {
  const bench::numbers given(argc, argv);
  const int64_t rounds = given.of("--rounds", 8), seq = given.of("--seq", 256), hidden = given.of("--hidden", 512);
  for (const int64_t h : {hidden / 2, hidden}) compare(h, seq, rounds);
  hide_exchanges(hidden, rounds);
  const std::size_t even = peak_of(false), skewed = peak_of(true);
  // Rows of the other three ranks. Each of 4 layers keeps input, gate, up and product. The backward pass of one layer
  // has gradients of all these, and copies before and after the exchanges.
  constexpr double rows = 3 * (2 * 256 * 2), wide = 384, deep = 256;
  const double bound = static_cast<double>(even) + 4 * rows * (4 * (deep + 3 * wide) + 5 * deep + 3 * wide);
  fmt::print(
      "4 ranks of experts: a step holds {:.1f} MB on a rank, and {:.1f} MB where one rank gets all rows, 4 times "
      "its share; bound {:.1f} MB\n",
      static_cast<double>(even) * 1e-6, static_cast<double>(skewed) * 1e-6, bound * 1e-6);
  return static_cast<double>(skewed) <= bound ? 0 : 1;
} catch (const std::exception& e) {
  fmt::print(stderr, "mixture_step: {}\n", e.what());
  return 1;
}
