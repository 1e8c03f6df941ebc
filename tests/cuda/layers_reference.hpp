#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/nn/combinators.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/strategy.hpp"

/// A small block without attention, for any strategy and device: layer norm, SwiGLU MLP with biases, dropout, residual
/// sum, another norm, and a linear with bias.
namespace plait::test {

/// One rank's part of a tensor.
struct part_values {
  std::string name;
  box part;
  std::vector<double> values;
};
/// Output, input gradient and parameter gradients, as one rank has them.
using block_outcome = std::vector<part_values>;

template <class S>
struct biased_head : transformer_specs<S>::head {
  static constexpr bool bias = true;
};

inline dim_sizes block_sizes() {
  return sizes_of<batch, seq, hidden, heads, kv_heads, head_dim, ffn, vocab>(4, 16, 32, 4, 4, 8, 64, 48);
}

template <class T, class Device>
part_values read_part(context<Device>& ctx, std::string name, const box& part, const T* data) {
  std::vector<T> host(static_cast<std::size_t>(part.local_size()));
  ctx.device.download(host.data(), data, host.size() * sizeof(T), ctx.device.main_stream());
  part_values out{std::move(name), part, {}};
  for (const T x : host) {
    if constexpr (std::is_same_v<T, bf16>)
      out.values.push_back(static_cast<double>(std::bit_cast<float>(std::uint32_t{x.bits} << 16)));
    else
      out.values.push_back(static_cast<double>(x));
  }
  return out;
}

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

/// One rank of the cpu, in float.
block_outcome block_on_cpu(const std::string& strategy);

}  // namespace plait::test
