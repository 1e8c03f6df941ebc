// program: layers
// Calls that would write what they still read, and tensors of other sizes than a layer's: refused before anything runs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/pointwise.hpp"
#include "plait/tensor/redistribution.hpp"
#include "support/on_pointers.hpp"
#include "support/small_layers.hpp"
#include "support/texts.hpp"

namespace plait::test::small_layers {

TEST_CASE("a call does not write what it still reads") {
  const auto refused = [](auto work) {
    return on_ranks(1, [&](const context<cpu>& ctx) {
      std::vector<double> x(tokens * width, 1.0), y(tokens * wide, 1.0);
      linear<double, up> layer(ctx, "up");
      layer.visit([&](auto& p) { p.initialize(ctx); });
      gather_parameters(ctx, layer);
      zero_gradients(ctx, layer);
      linear<double, up>::saved kept;
      work(ctx, layer, kept, x.data(), y.data());
    });
  };
  CHECK(
      has(refused([](auto& ctx, auto& layer, auto& kept, double* x, double*) { forward_on(layer, ctx, x, x, &kept); }),
          "up.weight: forward writes y while it still reads x, and both are one array"));
  CHECK(has(
      refused([](auto& ctx, auto& layer, auto& kept, double* x, double* y) { forward_on(layer, ctx, x, y, &kept, y); }),
      "up.weight: forward writes y while it still reads addend"));
  CHECK(has(refused([](auto& ctx, auto& layer, auto& kept, double* x, double* y) {
              forward_on(layer, ctx, x, y, &kept);
              backward_on(layer, ctx, x, kept, y, x);
            }),
            "up.weight: backward writes dx while it still reads x"));
  CHECK(has(on_ranks(1,
                     [](const context<cpu>& ctx) {
                       std::vector<double> x(tokens * width, 1.0), dy(x), dx(x);
                       rms_norm<double, rows> norm(ctx, 1e-5, "norm");
                       norm.visit([&](auto& p) { p.initialize(ctx); });
                       gather_parameters(ctx, norm);
                       zero_gradients(ctx, norm);
                       rms_norm<double, rows>::saved kept;
                       backward_on(norm, ctx, x.data(), kept, dy.data(), dx.data());
                     }),
            "norm.weight: backward without what forward keeps"));
  CHECK(has(on_ranks(1,
                     [](const context<cpu>& ctx) {
                       std::vector<double> x(tokens * width, 1.0), dy(x);
                       rms_norm<double, rows> norm(ctx, 1e-5, "norm");
                       norm.visit([&](auto& p) { p.initialize(ctx); });
                       gather_parameters(ctx, norm);
                       zero_gradients(ctx, norm);
                       rms_norm<double, rows>::saved kept;
                       std::vector<double> y(x);
                       forward_on(norm, ctx, x.data(), y.data(), &kept);
                       backward_on(norm, ctx, x.data(), kept, dy.data(), dy.data());
                     }),
            "norm.weight: backward writes dx while it still reads dy"));
  CHECK(has(on_ranks(1,
                     [](const context<cpu>& ctx) {
                       std::vector<double> x(tokens * width, 1.0), y(x), dy(x);
                       layer_norm<double, rows> norm(ctx, 1e-5, "norm");
                       norm.visit([&](auto& p) { p.initialize(ctx); });
                       gather_parameters(ctx, norm);
                       zero_gradients(ctx, norm);
                       layer_norm<double, rows>::saved kept;
                       forward_on(norm, ctx, x.data(), y.data(), &kept);
                       backward_on(norm, ctx, x.data(), kept, dy.data(), x.data());
                     }),
            "norm.weight: backward writes dx while it still reads x"));
}

TEST_CASE("tensors of other sizes than the layer's are refused") {
  CHECK(has(on_ranks(1,
                     [](const context<cpu>& ctx) {
                       linear<double, up> layer(ctx, "up");
                       layer.visit([&](auto& p) { p.initialize(ctx); });
                       gather_parameters(ctx, layer);
                       context<cpu> longer = ctx;
                       longer.sizes.set(dim_of<seq>, 2 * tokens);
                       const tensor<double, rows> x(longer);
                       layer.forward(longer, x);
                     }),
            "up.weight: x has 64 elements on this rank, and the layer was made for 32"));
  CHECK(has(on_ranks(1,
                     [](const context<cpu>& ctx) {
                       rms_norm<double, rows> norm(ctx, 1e-5, "norm");
                       norm.visit([&](auto& p) { p.initialize(ctx); });
                       gather_parameters(ctx, norm);
                       context<cpu> longer = ctx;
                       longer.sizes.set(dim_of<seq>, 2 * tokens);
                       const tensor<double, rows> x(longer);
                       norm.forward(longer, x);
                     }),
            "norm.weight: x has 64 elements on this rank, and the layer was made for 32"));
  // What has no sizes of its own goes by the context.
  const auto longer_than = [](const context<cpu>& ctx) {
    context<cpu> longer = ctx;
    longer.sizes.set(dim_of<seq>, 2 * tokens);
    return longer;
  };
  CHECK(has(on_ranks(1,
                     [&](const context<cpu>& ctx) {
                       activation<double, gelu, rows> f;
                       f.forward(ctx, tensor<double, rows>(longer_than(ctx)));
                     }),
            "activation: x has 64 elements on this rank, and the layer was made for 32"));
  CHECK(has(on_ranks(2,
                     [&](const context<cpu>& ctx) {
                       const tensor<double, rows> x(ctx);
                       redistribute<spec<seq, hidden, replicate<tp>>>(longer_than(ctx), x);
                     }),
            "redistribute: in has 16 elements, and in this context there are 32"));
  CHECK(has(on_ranks(1,
                     [&](const context<cpu>& ctx) {
                       redistribution<double, rows, spec<seq, hidden, replicate<tp>>> moves(ctx);
                       moves.forward(ctx, tensor<double, rows>(longer_than(ctx)));
                     }),
            "redistribution: x has 64 elements on this rank, and the layer was made for 32"));
  CHECK(has(on_ranks(1,
                     [&](const context<cpu>& ctx) {
                       swiglu_mlp<double, tensor_strategy> mlp(ctx, "mlp");
                       mlp.forward(ctx, tensor<double, swiglu_mlp<double, tensor_strategy>::input>(longer_than(ctx)));
                     }),
            "mlp.gate_proj.weight: x has 64 elements on this rank, and the layer was made for 32"));
  CHECK(has(on_ranks(1,
                     [&](const context<cpu>& ctx) {
                       self_attention<double, tensor_strategy> attention(ctx, "attention");
                       attention.forward(
                           ctx, tensor<double, self_attention<double, tensor_strategy>::input>(longer_than(ctx)));
                     }),
            "attention.q_proj.weight: x has 64 elements on this rank, and the layer was made for 32"));
}

TEST_CASE("a call does not write bytes that it still reads, wherever arrays begin") {
  const auto refused = [](auto work) {
    return on_ranks(1, [&](const context<cpu>& ctx) {
      std::vector<double> all(4 * tokens * wide, 1.0);
      linear<double, up> layer(ctx, "up", {.memory = {all.data() + 3 * tokens * wide, own_memory}});
      gather_parameters(ctx, layer);
      zero_gradients(ctx, layer);
      linear<double, up>::saved kept;
      work(ctx, layer, kept, all.data());
    });
  };
  constexpr std::int64_t in = tokens * width, out = tokens * wide;
  CHECK(
      has(refused([](auto& ctx, auto& layer, auto& kept, double* p) { forward_on(layer, ctx, p, p + in - 2, &kept); }),
          "up.weight: forward writes y while it still reads x, and they share 16 bytes"));
  CHECK(
      has(refused([](auto& ctx, auto& layer, auto& kept, double* p) { forward_on(layer, ctx, p + out - 1, p, &kept); }),
          "up.weight: forward writes y while it still reads x, and they share 8 bytes"));
  CHECK(has(
      refused([](auto& ctx, auto& layer, auto& kept, double* p) { forward_on(layer, ctx, p, p + 3 * out - 1, &kept); }),
      "up.weight: forward writes y while it still reads the weight, and they share 192 bytes"));
  CHECK(has(refused([](auto& ctx, auto& layer, auto& kept, double* p) {
              forward_on(layer, ctx, p, p + in, &kept);
              backward_on(layer, ctx, p, kept, p + in, p + in + out - 3);
            }),
            "up.weight: backward writes dx while it still reads dy, and they share 24 bytes"));
  CHECK(refused([](auto& ctx, auto& layer, auto& kept, double* p) {  // side by side
          forward_on(layer, ctx, p, p + in, &kept);
          backward_on(layer, ctx, p, kept, p + in, p + in + out);
        }) == "");
  CHECK(has(on_ranks(1,
                     [](const context<cpu>& ctx) {
                       rms_norm<double, rows> norm(ctx, 1e-5, "norm");
                       norm.visit([&](auto& p) { p.initialize(ctx); });
                       gather_parameters(ctx, norm);
                       zero_gradients(ctx, norm);
                       rms_norm<double, rows>::saved kept;
                       std::vector<double> x(in, 1.0), all(2 * in, 1.0);
                       forward_on(norm, ctx, x.data(), all.data(), &kept);
                       backward_on(norm, ctx, x.data(), kept, all.data(), all.data() + in - 1);
                     }),
            "norm.weight: backward writes dx while it still reads dy, and they share 8 bytes"));
}

}  // namespace plait::test::small_layers
