#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cuda/device/device_array.hpp"
#include "plait/comm/threads/cuda.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "support/split_strategy.hpp"

/// Records layers as graphs, counts their operations, and compares layers with their unfused parts.
namespace plait::test::fusions {

using rows = split::residual;
using gathered = spec<shard<batch, dp>, seq, hidden, replicate<tp>>;

template <class Input, bool Bias>
struct up_policy {
  using input = Input;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
  static constexpr bool bias = Bias;
};

struct down_policy {
  using input = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = rows;
};

/// The kernels, products, copies and fills of `work` in the main stream.
template <class Work>
std::size_t nodes(cuda& device, const Work& work) {
  work();
  work();  // allocates all its memory, and returns only part of it
  const cudaStream_t stream = device.main_stream().handle();
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  work();
  REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
  std::size_t count = 0;
  REQUIRE(cudaGraphGetNodes(graph, nullptr, &count) == cudaSuccess);
  cudaGraphDestroy(graph);
  work();  // recording did not run it
  return count;
}

inline context<cuda> sized(cuda& device, world& ranks) {
  return {device, ranks, sizes_of<batch, seq, hidden, ffn, heads, kv_heads, head_dim>(2, 16, 32, 64, 4, 2, 64), 3};
}

template <class F>
void on_one_rank(F&& body) {
  threads::run(1, cuda::options{.workspace_bytes = 4 << 20}, [&](threads::communicator c, cuda& device) {
    world ranks(split::mesh{1, 1}.shape(), c);
    context<cuda> ctx = sized(device, ranks);
    body(ctx);
    device.synchronize();
  });
}

template <class Spec, class T = float>
tensor<T, Spec, cuda> random_tensor(context<cuda>& ctx, std::uint64_t stream) {
  tensor<T, Spec, cuda> x(ctx);
  kernels::fill_normal(ctx.device, x.data(), x.part(), 5, stream, 0.1, 1.0);
  return x;
}
template <class Layer>
void fill(context<cuda>& ctx, Layer& layer) {
  layer.visit([&](auto& p) {
    kernels::fill_normal(ctx.device, p.value(), p.part(), 5, p.stream_of(p.name()), 0.2, 0.4);
    p.gather(ctx);
    p.zero_gradient(ctx);
  });
}

template <class T>
values read(context<cuda>& ctx, const T* from, std::int64_t size) {
  std::vector<T> host(static_cast<std::size_t>(size));
  ctx.device.download(host.data(), from, host.size() * sizeof(T), ctx.device.main_stream());
  values out;
  for (const T v : host) out.push_back(widened(v));
  return out;
}
template <class Tensor>
values read(context<cuda>& ctx, const Tensor& x) {
  return read(ctx, x.data(), x.size());
}
inline values plus(values a, const values& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

/// Makes values saved by a forward pass valid for another backward pass: operations are counted by running it twice.
template <class Saved>
void reuse(Saved& kept) {
  if constexpr (requires { kept.stamp; })
    kept.stamp = {};
  else if constexpr (requires { kept.in, kept.out; })
    reuse(kept.in), reuse(kept.out);
  else if constexpr (requires { kept.norm, kept.inner; })
    reuse(kept.norm), reuse(kept.inner);
  else if constexpr (requires { kept.layers; })
    std::apply([](auto&... each) { (reuse(each), ...); }, kept.layers);
  else if constexpr (requires { kept.branches; })
    std::apply([](auto&... each) { (reuse(each), ...); }, kept.branches);
  else if constexpr (requires { kept.blocks; })
    for (auto& each : kept.blocks) reuse(each);
}

/// Compares the branch's sum with the stream, and the sum of their gradients, with the unfused parts.
template <class Norm>
void check_residual(context<cuda>& ctx, double dropout_p) {
  using T = typename Norm::value_type;
  using mlp = swiglu_mlp<T, split, cuda>;
  residual<Norm, mlp> block(Norm(ctx), mlp(ctx, "mlp"), {dropout_p, "drop"});
  fill(ctx, block);
  const auto x = random_tensor<rows, T>(ctx, 1);
  const auto dy = random_tensor<dual_t<rows>, T>(ctx, 2);
  typename residual<Norm, mlp>::saved kept;
  typename Norm::saved norm_kept;
  typename mlp::saved mlp_kept;
  tensor<T, rows, cuda> y, normalized, inner;
  tensor<T, dual_t<rows>, cuda> dx, dinner, dnorm;
  const std::size_t forward = nodes(ctx.device, [&] { y = block.forward(ctx, x, &kept); });
  const std::size_t norm_forward = nodes(ctx.device, [&] { normalized = block.norm().forward(ctx, x, &norm_kept); });
  const std::size_t inner_forward =
      nodes(ctx.device, [&] { inner = block.inner().forward(ctx, normalized, &mlp_kept); });
  const std::size_t backward = nodes(ctx.device, [&] { reuse(kept), dx = block.backward(ctx, x, kept, dy); });
  const std::size_t inner_backward =
      nodes(ctx.device, [&] { reuse(mlp_kept), dinner = block.inner().backward(ctx, normalized, mlp_kept, dy); });
  const std::size_t norm_backward =
      nodes(ctx.device, [&] { reuse(norm_kept), dnorm = block.norm().backward(ctx, x, norm_kept, dinner); });
  if (dropout_p == 0) {
    CHECK(forward == norm_forward + inner_forward);
    CHECK(backward == norm_backward + inner_backward);
    CHECK(difference(read(ctx, y), plus(read(ctx, x), read(ctx, inner))) < tolerance<T>);
    CHECK(difference(read(ctx, dx), plus(read(ctx, dy), read(ctx, dnorm))) < tolerance<T>);
  } else {
    CHECK(forward == norm_forward + inner_forward + 2);     // the mask, then the sum
    CHECK(backward == norm_backward + inner_backward + 2);  // a copy with the mask
  }
}

/// Two blocks of two branches, whose sums are added where they are read, compared with single branches.
template <class Norm>
struct chain {
  using T = typename Norm::value_type;
  using branch = residual<Norm, swiglu_mlp<T, split, cuda>>;
  using block = sequential<branch, branch>;

  chain(context<cuda>& ctx, double dropout_p) : together(stack<block>(blocks(ctx, dropout_p))) {
    fill(ctx, together);
    for (int i = 0; i < 4; ++i) {
      apart.push_back(make(ctx, i, dropout_p));
      fill(ctx, apart.back());
    }
  }
  static branch make(context<cuda>& ctx, int i, double dropout_p) {
    const std::string name = "branch" + std::to_string(i);
    return branch(Norm(ctx, 1e-5, name + ".norm"), {ctx, name + ".mlp"}, {dropout_p, name});
  }
  static std::vector<block> blocks(context<cuda>& ctx, double dropout_p) {
    std::vector<block> all;
    for (int i = 0; i < 4; i += 2) all.push_back(block(make(ctx, i, dropout_p), make(ctx, i + 1, dropout_p)));
    return all;
  }

  stack<block> together;
  std::vector<branch> apart;
};

/// Results are bitwise equal for every choice of saved values.
template <class Norm>
void check_chain_values(context<cuda>& ctx, double dropout_p) {
  using T = typename Norm::value_type;
  using all = chain<Norm>;
  all layers(ctx, dropout_p);
  const auto x = random_tensor<rows, T>(ctx, 1);
  const auto dy = random_tensor<dual_t<rows>, T>(ctx, 2);
  std::vector<tensor<T, rows, cuda>> between;
  std::vector<typename all::branch::saved> kept(4);
  for (std::size_t i = 0; i < 4; ++i)
    between.push_back(layers.apart[i].forward(ctx, i == 0 ? x : between.back(), &kept[i]));
  tensor<T, dual_t<rows>, cuda> dx;
  for (std::size_t i = 4; i-- > 0;)
    dx = layers.apart[i].backward(ctx, i == 0 ? x : between[i - 1], kept[i], i == 3 ? dy : dx);
  CHECK(read(ctx, layers.together.forward(ctx, x)) == read(ctx, between.back()));
  for (const recompute policy : {recompute::none, recompute::selective, recompute::full}) {
    microbatch<cuda> mb = ctx;
    mb.policy = policy;
    typename stack<typename all::block>::saved saved;
    CHECK(read(ctx, layers.together.forward(mb, x, &saved)) == read(ctx, between.back()));
    reuse(saved);
    CHECK(read(ctx, layers.together.backward(mb, x, saved, dy)) == read(ctx, dx));
  }
}

template <class Norm>
void check_chain(context<cuda>& ctx) {
  using T = typename Norm::value_type;
  for (const double dropout_p : {0.0, 0.25}) {
    check_chain_values<Norm>(ctx, dropout_p);
    chain<Norm> layers(ctx, dropout_p);
    const auto x = random_tensor<rows, T>(ctx, 1);
    const std::size_t one = nodes(ctx.device, [&] { layers.apart[0].forward(ctx, x); });
    const std::size_t four = nodes(ctx.device, [&] { layers.together.forward(ctx, x); });
    CHECK(four == 4 * one - (dropout_p > 0 ? 3 : 0));  // the products add, or all norms except the first
  }
}

/// A linear without a bias and one with it, an input of both, and a gradient of their outputs.
template <class Precision>
struct two_linears {
  using T = activation_of<Precision>;
  using output = typename up_policy<gathered, false>::output;

  explicit two_linears(context<cuda>& ctx)
      : bare(ctx, "bare"),
        biased(ctx, "biased"),
        x(random_tensor<gathered, T>(ctx, 1)),
        dy(random_tensor<dual_t<output>, T>(ctx, 2)) {
    fill(ctx, bare);
    fill(ctx, biased);
  }

  linear<Precision, up_policy<gathered, false>, cuda> bare;
  linear<Precision, up_policy<gathered, true>, cuda> biased;
  tensor<T, gathered, cuda> x;
  tensor<T, dual_t<output>, cuda> dy;
};

template <class Precision>
void check_linear(context<cuda>& ctx) {
  using T = activation_of<Precision>;
  two_linears<Precision> two(ctx);
  auto& [bare, biased, x, dy] = two;
  const auto first = random_tensor<typename two_linears<Precision>::output, T>(ctx, 3);
  const auto other = random_tensor<dual_t<gathered>, T>(ctx, 4);
  linear_saved<cuda> kept;
  const auto forward = nodes(ctx.device, [&] { bare.forward(ctx, x); });
  const bool fused = !std::is_same_v<T, double>;
  CHECK(nodes(ctx.device, [&] { biased.forward(ctx, x); }) == forward + (fused ? 0 : 1));
  CHECK(nodes(ctx.device, [&] { bare.forward(ctx, x, nullptr, &first); }) == forward);
  const auto backward = nodes(ctx.device, [&] { reuse(kept), bare.backward(ctx, x, kept, dy); });
  CHECK(nodes(ctx.device, [&] { reuse(kept), bare.backward(ctx, x, kept, dy, &other); }) == backward);

  const auto sum = biased.forward(ctx, x, nullptr, &first);
  CHECK(difference(read(ctx, sum), plus(read(ctx, biased.forward(ctx, x)), read(ctx, first))) < tolerance<T>);
  reuse(kept);
  const auto dsum = biased.backward(ctx, x, kept, dy, &other);
  reuse(kept);
  CHECK(difference(read(ctx, dsum), plus(read(ctx, biased.backward(ctx, x, kept, dy)), read(ctx, other))) <
        tolerance<T>);

  // The bias has the value of a separate addition.
  auto& bias = *biased.bias();
  const auto by_product = biased.forward(ctx, x);
  kernels::fill(ctx.device, bias.value(), bias.size(), master_of<Precision>{0});
  bias.gather(ctx);
  auto by_hand = biased.forward(ctx, x);
  fill(ctx, biased);
  kernels::add_bias(ctx.device, bias.used_value(), by_hand.data(), 32, 64, 64);
  CHECK(difference(read(ctx, by_product), read(ctx, by_hand)) < tolerance<T>);
}

/// Compares a linear on the caller's arrays with one on plait's arrays: results are equal. The caller's bias starts
/// `offset` elements after a 256-byte boundary; where cuBLASLt cannot read it, a separate kernel adds it.
template <class Precision>
void check_bias_of_caller(context<cuda>& ctx) {
  using T = activation_of<Precision>;
  using G = gradient_of<Precision>;
  using layer = linear<Precision, up_policy<gathered, true>, cuda>;
  two_linears<Precision> two(ctx);
  const auto forward = nodes(ctx.device, [&] { two.biased.forward(ctx, two.x); });
  const auto backward = [&](layer& l) {
    linear_saved<cuda> kept;
    l.visit([&](auto& p) { p.zero_gradient(ctx); });
    reuse(kept);
    l.backward(ctx, two.x, kept, two.dy);
    return read(ctx, l.bias()->gradient(), 64);
  };
  for (const std::size_t shift : {16 / sizeof(T), std::size_t{1}, std::size_t{3}}) {
    CAPTURE(shift);
    auto weight = make_buffer<T>(ctx.device, 64 * 32), bias = make_buffer<T>(ctx.device, 64 + shift);
    auto weight_gradient = make_buffer<G>(ctx.device, 64 * 32), bias_gradient = make_buffer<G>(ctx.device, 64 + shift);
    parameter_memory<Precision> memory{.weight = weight.template data<T>(),
                                       .gradient = weight_gradient.template data<G>()};
    memory.bias = bias.template data<T>() + shift;
    memory.bias_gradient = bias_gradient.template data<G>() + shift;
    if constexpr (!std::is_same_v<T, master_of<Precision>>) memory.master = memory.bias_master = own_memory;
    layer on_callers(ctx, "biased", {.memory = memory});
    fill(ctx, on_callers);
    const bool fused = shift * sizeof(T) % 16 == 0;
    CHECK(nodes(ctx.device, [&] { on_callers.forward(ctx, two.x); }) == forward + (fused ? 0 : 1));
    CHECK(difference(read(ctx, on_callers.forward(ctx, two.x)), read(ctx, two.biased.forward(ctx, two.x))) <
          tolerance<T>);
    CHECK(difference(backward(on_callers), backward(two.biased)) < 1e-6);
  }
}

/// The gradient of a bias: the product of the weight's gradient computes it. It does so in place for the first
/// microbatch; for later ones a pass adds the sums. Without such a product, passes over dy compute it.
template <class Precision>
void check_bias_gradient(context<cuda>& ctx, bool fused, bool defer) {
  two_linears<Precision> two(ctx);
  auto& [bare, biased, x, dy] = two;
  weight_work later;
  microbatch<cuda> mb = ctx;
  if (defer) mb.deferred = &later;
  const auto pass = [&](auto& layer, bool first) {
    linear_saved<cuda> kept;
    if (first) zero_gradients(ctx, layer);
    reuse(kept);
    layer.backward(mb, x, kept, dy);
    later.run();
  };
  const auto nodes_of = [&](auto& layer, bool first) { return nodes(ctx.device, [&] { pass(layer, first); }); };
  CHECK(nodes_of(biased, true) == nodes_of(bare, true) + (fused ? 0 : 3));    // zero, sums of groups, sums of those
  CHECK(nodes_of(biased, false) == nodes_of(bare, false) + (fused ? 1 : 2));  // adds the sums

  const auto gradient = [&](auto& parameter) { return read(ctx, parameter.gradient(), parameter.size()); };
  const values terms = read(ctx, dy);
  values once(64);
  for (std::size_t i = 0; i < terms.size(); ++i) once[i % 64] += terms[i];
  pass(biased, true);
  CHECK(difference(gradient(*biased.bias()), once) < 1e-6);  // in float also for bf16
  pass(biased, false);
  CHECK(difference(gradient(*biased.bias()), plus(once, once)) < 1e-6);
  pass(bare, true);
  pass(bare, false);
  CHECK(gradient(*biased.weight()) == gradient(*bare.weight()));
}

}  // namespace plait::test::fusions
