// program: layers
// Mixtures of experts on a GPU: ranks that share it and exchange rows have the results of one rank of the CPU.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/nn/block_parts.hpp"
#include "plait/nn/moe.hpp"
#include "plait/nn/moe/expert_mlp.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct mixture_strategy_here {
  using mesh = plait::mesh<axis<dp>, axis<ep>, axis<tp>>;
  using residual = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
  using query_heads = shard<heads, tp>;
  using key_heads = shard<kv_heads, tp>;
  using feed_forward = shard<ffn, tp>;
  using vocabulary = shard<vocab, tp>;
  using expert = shard<experts, ep>;
};
using mixture_mesh = mixture_strategy_here::mesh;

dim_sizes sizes_of_mixture() {
  dim_sizes s = block_sizes();
  s.set(dim_of<experts>, 8), s.set(dim_of<shared_ffn>, 24), s.set(dim_of<shared_gate>, 1);
  return s;
}

/// Output, gradients, the auxiliary losses and the statistics of a mixture with a shared expert.
template <class Device>
block_outcome run_mixture(world& ranks, Device& device, const moe_options& how) {
  using layer_type = expert_mlp<double, mixture_strategy_here, Device>;
  context<Device> ctx{device, ranks, sizes_of_mixture(), 11};
  layer_type layer(ctx, "mixture", how, true, {.gated = true});
  layer.visit([&](auto& p) {
    kernels::fill_normal(device, p.value(), p.part(), 5, p.stream_of(p.name()), 0.1, 0.3);
    p.gather(ctx);
    p.zero_gradient(ctx);
  });
  tensor<double, typename layer_type::input, Device> x(ctx);
  tensor<double, dual_t<typename layer_type::output>, Device> dy(ctx);
  kernels::fill_normal(device, x.data(), x.part(), 5, 1, 0.0, 1.0);
  kernels::fill_normal(device, dy.data(), dy.part(), 5, 2, 0.0, 1.0);
  auto value = make_buffer<double>(device, 1);
  device.zero(value.data(), value.bytes(), device.main_stream());
  auxiliary_sum auxiliary{value.template data<double>()};
  microbatch<Device> mb{ctx};
  mb.auxiliary = &auxiliary;
  typename layer_type::saved kept;
  const auto y = layer.forward(mb, x, &kept);
  const auto dx = layer.backward(mb, x, kept, dy);
  block_outcome out;
  out.push_back(read_part(ctx, "output", y.part(), y.data()));
  out.push_back(read_part(ctx, "input's gradient", dx.part(), dx.data()));
  layer.visit([&](auto& p) {
    if (!p.trainable()) return;
    const auto complete = p.reduce(ctx);
    out.push_back(read_part(ctx, p.name(), p.part(), complete.data()));
  });
  double loss = 0;
  device.download(&loss, value.data(), sizeof loss, device.main_stream());
  out.push_back({"auxiliary losses", {}, {all_reduce_scalar(device, ranks.root(), loss, reduce_op::sum)}});
  out.push_back({"router", {}, {}});
  const router_statistics routed = layer.statistics(ctx);
  for (const auto* counts : {&routed.load, &routed.dropped})
    for (const std::int64_t count : *counts) out.back().values.push_back(static_cast<double>(count));
  out.back().values.push_back(routed.entropy);
  device.synchronize();
  return out;
}

void check_mixture_on_gpu(const moe_options& how) {
  const auto run = [&](world& ranks, auto& device) { return run_mixture(ranks, device, how); };
  const block_outcome expected = on_cpu(mixture_mesh{1, 1, 1}, run);
  CHECK(expected.size() == 12);  // 3 weights of experts, 4 of the shared one, and the router's
  for (const mixture_mesh& mesh :
       {mixture_mesh{1, 1, 1}, mixture_mesh{1, 2, 1}, mixture_mesh{1, 2, 2}, mixture_mesh{2, 2, 1}}) {
    CAPTURE(mesh.size());
    for (const block_outcome& rank : on_gpu(mesh, run)) {
      REQUIRE(rank.size() == expected.size());
      for (std::size_t i = 0; i < rank.size(); ++i) {
        CAPTURE(expected[i].name);
        REQUIRE(rank[i].name == expected[i].name);
        const std::vector<double> wanted = values_in(rank[i].part, expected[i]);
        REQUIRE(rank[i].values.size() == wanted.size());
        double most = 0;
        for (std::size_t n = 0; n < wanted.size(); ++n) {
          const double error = std::fabs(rank[i].values[n] - wanted[n]);
          most = std::fmax(most, std::isfinite(error) ? error : HUGE_VAL);
        }
        CHECK(!wanted.empty());
        CHECK(most < 1e-10);
      }
    }
  }
}

}  // namespace

#ifdef PLAIT_CUDA_STAND_IN
TEST_CASE("experts' products on a GPU are eight calls, for any number of experts with rows") {
  const int before = stand_in::grouped_products;
  on_gpu(mixture_mesh{1, 1, 1}, [](world& ranks, cuda& device) {
    return run_mixture(ranks, device, {.init = {0, 0.3}});
  });
  CHECK(stand_in::grouped_products - before == 8);
}
TEST_CASE("padded experts' products on a GPU are nine calls, and need no addresses in its memory") {
  const int grouped = stand_in::grouped_products, strided = stand_in::strided_products;
  on_gpu(mixture_mesh{1, 1, 1}, [](world& ranks, cuda& device) {
    return run_mixture(ranks, device, {.init = {0, 0.3}, .padded = true});
  });
  CHECK(stand_in::grouped_products - grouped == 0);
  CHECK(stand_in::strided_products - strided == 9);
}
#endif
TEST_CASE("experts on a GPU with exchanged rows") { check_mixture_on_gpu({.init = {0, 0.3}}); }
TEST_CASE("padded experts on a GPU, with and without a limit") {
  check_mixture_on_gpu({.init = {0, 0.3}, .padded = true});
  check_mixture_on_gpu({.init = {0, 0.3}, .limit = {.factor = 1.25}, .padded = true});
}
TEST_CASE("experts on a GPU with a limit, auxiliary losses and a bias") {
  check_mixture_on_gpu(
      {.router = {.chosen = 3, .scores = kernels::expert_scores::sigmoid, .groups = 4, .chosen_groups = 2},
       .init = {0, 0.3},
       .losses = {{0.1, balance_over::sequence}, 0.01},
       .limit = {.factor = 1.25},
       .bias_rate = 0.01});
}
