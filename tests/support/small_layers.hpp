#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plait/nn/parameter/free.hpp"
#include "plait/nn/strategy.hpp"
#include "support/on_mesh.hpp"
#include "support/split_strategy.hpp"

namespace plait::test {

/// Initializes layers and sets their gradients to zero.
template <class... Layers>
void begin(const context<cpu>& ctx, Layers&... layers) {
  each_parameter([&](auto& p) { p.initialize(ctx); }, layers...);
  gather_parameters(ctx, layers...);
  zero_gradients(ctx, layers...);
}

}  // namespace plait::test

/// Policies of small layers on one axis, and runs of them on one or two ranks.
namespace plait::test::small_layers {

using two = plait::mesh<axis<tp>>;
using rows = spec<shard<seq, tp>, hidden>;
struct up {
  using input = rows;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<seq, shard<ffn, tp>>;
};
struct up_with_bias : up {
  static constexpr bool bias = true;
};
struct down {
  using input = up::output;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = rows;
};
struct split_table {
  using input = spec<seq, invariant<tp>>;
  using weight = spec<shard<vocab, tp>, hidden>;
  using output = rows;
};
struct tensor_strategy : split {
  using mesh = two;
  using residual = spec<batch, shard<seq, tp>, hidden>;
};

inline constexpr std::int64_t tokens = 8, width = 4, wide = 6, words = 10;

inline dim_sizes sizes_for(std::int64_t length, std::int64_t samples = 1) {
  return sizes_of<batch, seq, hidden, ffn, vocab, heads, kv_heads, head_dim>(samples, length, width, wide, words, 4, 2,
                                                                             2);
}

/// Runs work(ctx) on each of `ranks` ranks and returns the text of the error, or "".
template <class F>
std::string on_ranks(std::int64_t ranks, F work) {
  return error_on_mesh(two{ranks}, sizes_for(tokens), 1, work);
}
template <class F>
std::string on_two_ranks(F work) {
  return on_ranks(2, work);
}

inline context<cpu> with_sizes(const context<cpu>& ctx, const dim_sizes& sizes) {
  return {ctx.device, ctx.ranks, sizes, ctx.seed};
}

template <class T>
std::vector<double> numbers(const T* from, std::int64_t count) {
  std::vector<double> all;
  for (std::int64_t i = 0; i < count; ++i) all.push_back(static_cast<double>(from[i]));
  return all;
}

/// The output, the input's gradient and the weights' gradients of a pass on numbers derived from the sizes.
template <class Layer>
std::vector<double> pass(const context<cpu>& ctx, Layer& layer) {
  using T = typename Layer::value_type;
  tensor<T, typename Layer::input> x(ctx);
  tensor<T, dual_t<typename Layer::output>> dy(ctx);
  for (std::int64_t i = 0; i < x.size(); ++i) x.data()[i] = static_cast<T>(0.1 * static_cast<double>(i % 7) - 0.2);
  for (std::int64_t i = 0; i < dy.size(); ++i) dy.data()[i] = static_cast<T>(0.05 * static_cast<double>(i % 5) - 0.1);
  each_parameter([&](auto& p) { p.discard_gradient(ctx); }, layer);
  typename Layer::saved kept;
  const auto y = layer.forward(ctx, x, &kept);
  const auto dx = layer.backward(ctx, x, kept, dy);
  std::vector<double> all = numbers(y.data(), y.size());
  const std::vector<double> gradient = numbers(dx.data(), dx.size());
  all.insert(all.end(), gradient.begin(), gradient.end());
  layer.visit([&](auto& p) {
    if (!p.trainable()) return;
    const std::vector<double> g = numbers(p.used_gradient(ctx.device), p.used_size());
    all.insert(all.end(), g.begin(), g.end());
  });
  return all;
}

}  // namespace plait::test::small_layers
