// program: layers
// Layers that a Llama does not have, and strategies without sequence parallelism, on a GPU. Ranks that share it have
// the results of one rank, which are those of the CPU.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "cuda/nn/block_parts.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/strategy.hpp"

using namespace plait;
using namespace plait::test;

namespace {

// A small block without attention, for any strategy and device: layer norm, SwiGLU MLP with biases, dropout, residual
// sum, another norm, and a linear with bias.

template <class S>
struct biased_head : transformer_specs<S>::head {
  static constexpr bool bias = true;
};

template <class Precision, class S, class Device>
block_outcome run_block(world& ranks, Device& device) {
  using T = activation_of<Precision>;
  using specs = transformer_specs<S>;
  using rows = typename S::residual;
  using norm = layer_norm<Precision, rows, Device>;
  using mlp = swiglu_mlp<Precision, S, Device>;
  using branch = residual<norm, mlp>;
  using head = linear<Precision, biased_head<S>, Device>;
  context<Device> ctx{device, ranks, block_sizes(), 11};
  constexpr layout norm_stored = layout_v<typename specs::norm_weight>;
  sequential<branch, norm, head> block(
      branch(norm(ctx, 1e-5, "first", norm_stored), mlp(ctx, "mlp", {0, 0.2}, true), {0.1, "dropout"}),
      norm(ctx, 1e-5, "last", norm_stored), head(ctx, "head", {.init = {0, 0.2}}));
  block.visit([&](auto& p) {
    kernels::fill_normal(device, p.value(), p.part(), 5, p.stream_of(p.name()), 0.1, 0.3);
    p.gather(ctx);
    p.zero_gradient(ctx);
  });
  tensor<T, rows, Device> x(ctx);
  tensor<T, dual_t<typename specs::logits>, Device> dy(ctx);
  kernels::fill_normal(device, x.data(), x.part(), 5, 1, 0.0, 1.0);
  kernels::fill_normal(device, dy.data(), dy.part(), 5, 2, 0.0, 1.0);

  typename sequential<branch, norm, head>::saved kept;
  const auto y = block.forward(ctx, x, &kept);
  const auto dx = block.backward(ctx, x, kept, dy);
  block_outcome out;
  out.push_back(read_part(ctx, "output", y.part(), y.data()));
  out.push_back(read_part(ctx, "input's gradient", dx.part(), dx.data()));
  block.visit([&](auto& p) {
    const auto complete = p.reduce(ctx);
    out.push_back(read_part(ctx, p.name(), p.part(), complete.data()));
  });
  device.synchronize();
  return out;
}

template <class Precision, class S>
constexpr auto of_block = [](world& ranks, auto& device) { return run_block<Precision, S>(ranks, device); };

/// One rank of the cpu, in float.
template <class S>
block_outcome block_on_cpu() {
  return on_cpu(typename S::mesh{1, 1, 1, 1}, of_block<float, S>);
}

struct extents {
  std::int64_t dp, cp, tp;
};

template <class Precision, class S>
std::vector<block_outcome> block_on_gpu(extents e) {
  return on_gpu(typename S::mesh{e.dp, e.cp, e.tp, std::int64_t{1}}, of_block<Precision, S>);
}

void check_same(const block_outcome& got, const block_outcome& one, double tolerance) {
  REQUIRE(got.size() == one.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    CAPTURE(one[i].name);
    CHECK(got[i].name == one[i].name);
    CHECK(one[i].values.size() == static_cast<std::size_t>(one[i].part.global_size()));
    CHECK(!got[i].values.empty());
    CHECK(difference(got[i].values, values_in(got[i].part, one[i])) < tolerance);
  }
}

template <class S, class Reference>
void check_strategy() {
  const block_outcome expected = block_on_cpu<Reference>();
  CHECK(expected.size() == 14);  // output, its input's gradient, 4 of norms, 6 of the mlp, 2 of the head
  for (const extents e : {extents{1, 1, 1}, {2, 1, 1}, {1, 1, 2}, {2, 1, 2}, {1, 1, 4}, {1, 2, 2}}) {
    CAPTURE(e.dp);
    CAPTURE(e.cp);
    CAPTURE(e.tp);
    for (const block_outcome& rank : block_on_gpu<float, S>(e)) check_same(rank, expected, 1e-5);
  }
}

}  // namespace

TEST_CASE("layers on a GPU: sequence parallelism") { check_strategy<megatron_sp, megatron_sp>(); }
TEST_CASE("layers on a GPU: tensor parallelism without sequence parallelism") {
  check_strategy<megatron_tp, megatron_tp>();
}
TEST_CASE("layers on a GPU: parameters stored over dp") { check_strategy<stored_over_dp<megatron_tp>, megatron_tp>(); }
TEST_CASE("layers on a GPU: in bf16, near one rank in float") {
  const block_outcome expected = block_on_cpu<megatron_sp>();
  for (const extents e : {extents{1, 1, 1}, {2, 1, 2}})
    for (const block_outcome& rank : block_on_gpu<bf16, stored_over_dp<megatron_sp>>(e))
      check_same(rank, expected, 3e-2);
}

TEST_CASE("a product in bf16 is rounded once, for every split of its sum") {
  cuda device;
  constexpr std::int64_t k = 1028;  // 257 ones, which bf16 cannot represent; then 256 of -1
  std::vector<bf16> a(k, to_bf16(0)), b(k, to_bf16(1)), c(1);
  for (std::size_t i = 0; i < 257; ++i) a[i] = to_bf16(1);
  for (std::size_t i = 772; i < 1028; ++i) a[i] = to_bf16(-1);
  const auto uploaded = [&](const std::vector<bf16>& from) {
    auto memory = make_buffer<bf16>(device, from.size());
    device.upload(memory.data(), from.data(), from.size() * sizeof(bf16), device.main_stream());
    return memory;
  };
  auto x = uploaded(a), y = uploaded(b), z = uploaded(c);
  device.gemm(false, false, 1, 1, k, 1.0, x.data<bf16>(), k, y.data<bf16>(), 1, 0.0, z.data<bf16>(), 1);
  device.download(c.data(), z.data(), sizeof(bf16), device.main_stream());
  CHECK(to_float(c[0]) == 1.0f);
}
