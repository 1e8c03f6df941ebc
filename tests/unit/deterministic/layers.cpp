// Layers with deterministic sums. Outputs and gradients of inputs and weights have the bits of one rank on every mesh,
// and differ from other sums by rounding only. Kept and sent bytes are as a dry run predicts. Layers that have no such
// order are refused by name.
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "plait/nn/attention.hpp"
#include "plait/nn/attention/chosen.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/units.hpp"
#include "support/layer_check.hpp"
#include "support/linear_policies.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Rows that are not samples of a text, and rows of a token.
struct points : dim_tag<"points"> {};
struct views : dim_tag<"views"> {};

constexpr deterministic_leaves order{4, 4, 4, 1};
const testing::on_cpu deterministic{{.deterministic = true}};

dim_sizes sizes() {
  dim_sizes s = transformer_sizes(4, 16);
  s.set(dim_of<zseq>, 16), s.set(dim_of<hidden>, 24), s.set(dim_of<ffn>, 40, 5);
  s.set(dim_of<heads>, 8, 2), s.set(dim_of<kv_heads>, 4), s.set(dim_of<head_dim>, 4);
  s.set(dim_of<points>, 12, 3), s.set(dim_of<views>, 3);
  return s;
}

void check_near(const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
  REQUIRE(a.size() == b.size());
  double worst = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i)
    worst = std::max(worst, std::abs(a[i] - b[i])), size = std::max(size, std::abs(a[i]));
  CHECK(worst <= tolerance * size);
}

/// `make` makes a layer whose values are of T.
template <class T, class Mesh, class Make>
void check(const Mesh& alone, std::initializer_list<Mesh> meshes, Make&& make, const deterministic_leaves& of = order,
           const dim_sizes& lengths = sizes()) {
  const auto run = [&](const Mesh& mesh, bool deferred) {
    const layer_run how{.policy = deferred ? recompute::selective : recompute::none, .deferred = deferred, .order = of};
    return run_on(mesh, lengths, make, how, deterministic);
  };
  const layer_values usual = run_on(alone, lengths, make)[0], one = run(alone, false)[0];
  const double tolerance = sizeof(T) == 8 ? 1e-13 : 1e-4;
  check_near(one.y, usual.y, tolerance);
  check_near(one.dx, usual.dx, tolerance);
  for (std::size_t i = 0; i < one.gradients.size(); ++i)
    check_near(one.gradients[i].second, usual.gradients[i].second, tolerance);
  const auto check_bits = [&](const Mesh& mesh, bool deferred) {
    for (const layer_values& rank : run(mesh, deferred)) {
      INFO(describe(mesh.shape()) << ", deferred " << deferred);
      CHECK(rank.found.text() == "");
      CHECK(rank.y == one.y);
      CHECK(rank.dx == one.dx);
      REQUIRE(rank.gradients.size() == one.gradients.size());
      for (std::size_t i = 0; i < one.gradients.size(); ++i) {
        INFO(one.gradients[i].first);
        CHECK(rank.gradients[i].second == one.gradients[i].second);
      }
    }
  };
  CHECK(one.found.text() == "");
  check_bits(alone, true);
  bool deferred = sizeof(T) == 8;  // each mesh has deferred gradients with one type, and the others with the other type
  for (const Mesh& mesh : meshes) check_bits(mesh, std::exchange(deferred, !deferred));
}
template <class T, template <class, class, class> class Layer, class Policy>
void check_policy(std::initializer_list<two> meshes = {two{1, 2}, two{2, 1}, two{2, 2}, two{4, 1}, two{2, 4}},
                  const deterministic_leaves& of = order) {
  check<T>(
      two{1, 1}, meshes, [](const auto& ctx) { return Layer<T, Policy, device_of<decltype(ctx)>>(ctx, "layer"); }, of);
}
template <class T, class Spec>
void check_norms() {
  const auto meshes = {two{1, 2}, two{2, 1}, two{2, 2}, two{1, 4}, two{4, 1}};
  check<T>(two{1, 1}, meshes,
           [](const auto& ctx) { return rms_norm<T, Spec, device_of<decltype(ctx)>>(ctx, 1e-5, "norm"); });
  check<T>(two{1, 1}, meshes,
           [](const auto& ctx) { return layer_norm<T, Spec, device_of<decltype(ctx)>>(ctx, 1e-5, "norm"); });
}

/// A weight stored as [in, out].
using column_by_inputs = spec<hidden, shard<ffn, tp>>;
using row_by_inputs = spec<shard<ffn, tp>, hidden>;

using four_axes = context_parallel<megatron_sp, chosen<cp>>;

}  // namespace

TEST_CASE_TEMPLATE("linears", T, float, double) {
  check_policy<T, linear, policy<rows_split, column, wide, true>>();
  check_policy<T, linear, policy<rows_whole, column, wide>>();
  check_policy<T, linear, policy<wide, row, rows_split, true>>();
  check_policy<T, linear, policy<wide, row, rows_whole, true>>();
  check_policy<T, linear, policy<rows_split, column_by_inputs, wide, true>>();
  check_policy<T, linear, policy<wide, row_by_inputs, rows_split>>();
  // A product that is wider than the output, which has the rank's features only.
  check_policy<T, linear, policy<wide, row, spec<shard<batch, dp>, seq, shard<hidden, tp>>, true>>();
}

TEST_CASE_TEMPLATE("linears and norms of ranks with unequal numbers of leaves", T, float, double) {
  const auto meshes = {two{3, 1}, two{1, 3}, two{3, 2}, two{1, 5}, two{1, 7}};
  const deterministic_leaves eight{8, 4, 2, 1};  // 4 samples, 16 positions, 8 times 5 features
  check_policy<T, linear, policy<rows_split, column, wide, true>>(meshes, eight);
  check_policy<T, linear, policy<wide, row, rows_split, true>>(meshes, eight);
  check_policy<T, linear, policy<wide, row, rows_whole, true>>(meshes, eight);
  check_policy<T, linear, policy<wide, row, spec<shard<batch, dp>, seq, shard<hidden, tp>>>>(meshes, eight);
  check_policy<T, linear,
               policy<spec<shard<points, dp>, shard<ffn, tp>>, row, spec<shard<points, dp>, hidden, invariant<tp>>>>(
      meshes, eight);
  check<T>(
      two{1, 1}, meshes,
      [](const auto& ctx) { return rms_norm<T, rows_split, device_of<decltype(ctx)>>(ctx, 1e-5, "norm"); }, eight);
}

TEST_CASE_TEMPLATE("linears of rows other than [batch, seq]", T, float, double) {
  check_policy<
      T, linear,
      policy<spec<shard<batch, dp>, hidden, invariant<tp>>, column, spec<shard<batch, dp>, shard<ffn, tp>>, true>>();
  check_policy<
      T, linear,
      policy<spec<shard<points, dp>, shard<ffn, tp>>, row, spec<shard<points, dp>, hidden, invariant<tp>>, true>>();
  check_policy<T, linear,
               policy<spec<shard<batch, dp>, shard<seq, tp>, views, hidden>, column,
                      spec<shard<batch, dp>, seq, views, shard<ffn, tp>>, true>>();
}

TEST_CASE_TEMPLATE("linears whose weight or bias is frozen", T, float, double) {
  for (const bool weight : {false, true})
    check<T>(two{1, 1}, {two{1, 2}, two{2, 1}, two{2, 2}}, [weight](const auto& ctx) {
      linear<T, policy<rows_split, column, wide, true>, device_of<decltype(ctx)>> layer(ctx, "layer");
      layer.visit([&](auto& p) {
        if ((p.name() == "layer.weight") == weight) p.freeze();
      });
      return layer;
    });
}

TEST_CASE_TEMPLATE("norms", T, float, double) {
  check_norms<T, rows_split>();
  check_norms<T, rows_whole>();
  check_norms<T, spec<shard<points, dp>, views, hidden, invariant<tp>>>();
}

TEST_CASE_TEMPLATE("attention and MLPs", T, float, double) {
  using mesh = megatron_sp::mesh;
  using masks = kernels::attention_mask;
  const auto meshes = {mesh{1, 1, 2, 1}, mesh{1, 2, 1, 1}, mesh{2, 2, 2, 1}, mesh{1, 4, 2, 1}};
  for (const chosen_policy how : {chosen_policy::ring, chosen_policy::all_gather_kv, chosen_policy::ulysses})
    for (const masks& mask :
         {masks::causal(), masks::window(5), masks::full(), masks::local(2, 5), masks::prefix_lm(5)}) {
      if (how == chosen_policy::ulysses && mask != masks::causal()) continue;
      check<T>(mesh{1, 1, 1, 1}, how == chosen_policy::ulysses ? std::initializer_list<mesh>{mesh{1, 2, 2, 1}} : meshes,
               [=](const auto& ctx) {
                 attention_options options{.mask = mask, .context = how, .qkv_bias = true, .output_bias = true};
                 options.frequencies = {1, 0.1};
                 if (mask == masks::window(5)) options.score = {.cap = 0.3, .alibi = true};
                 return self_attention<T, four_axes, device_of<decltype(ctx)>>(ctx, "attention", options);
               });
    }
  check<T>(mesh{1, 1, 1, 1}, meshes, [](const auto& ctx) {
    return swiglu_mlp<T, four_axes, device_of<decltype(ctx)>>(ctx, "mlp", initializer{}, true);
  });
}

TEST_CASE_TEMPLATE("attention and MLPs of ranks with unequal numbers of leaves", T, float, double) {
  using mesh = megatron_sp::mesh;
  dim_sizes in_leaves = sizes();
  in_leaves.set(dim_of<ffn>, 40, 10);
  dim_sizes in_chunks = in_leaves;
  in_chunks.set(dim_of<seq>, 16, 4);
  const auto check_on = [&](std::initializer_list<mesh> meshes, const dim_sizes& lengths, auto&& make) {
    check<T>(mesh{1, 1, 1, 1}, meshes, make, order, lengths);
  };
  for (const chosen_policy how : {chosen_policy::ring, chosen_policy::all_gather_kv}) {
    const auto attention = [how](const auto& ctx) {
      attention_options options{.context = how, .qkv_bias = true, .output_bias = true};
      options.frequencies = {1, 0.1};
      return self_attention<T, four_axes, device_of<decltype(ctx)>>(ctx, "attention", options);
    };
    check_on({mesh{1, 1, 3, 1}, mesh{3, 1, 3, 1}, mesh{1, 2, 3, 1}}, in_leaves, attention);
    check_on({mesh{1, 3, 1, 1}, mesh{3, 3, 1, 1}}, in_chunks, attention);
  }
  check_on({mesh{1, 1, 3, 1}, mesh{1, 2, 3, 1}}, in_leaves, [](const auto& ctx) {
    return swiglu_mlp<T, four_axes, device_of<decltype(ctx)>>(ctx, "mlp", initializer{}, true);
  });
}

namespace {
/// The text of the error for a layer on one or several ranks.
template <class Mesh, class Make>
std::string refusal(const Mesh& mesh, Make&& make, cpu::options device = {.deterministic = true},
                    deterministic_leaves of = order, const dim_sizes& lengths = sizes()) {
  return text_thrown_by([&] {
    threads::run(static_cast<int>(mesh.size()), [&](threads::communicator c) {
      world ranks(mesh.shape(), c);
      cpu own(device);
      make(context<cpu>{own, ranks, lengths, 1, of});
    });
  });
}
bool is_refused(const auto& mesh, const char* text, auto&& make, cpu::options device = {.deterministic = true},
                deterministic_leaves of = order, const dim_sizes& lengths = sizes()) {
  return has(refusal(mesh, make, device, of, lengths), text);
}
}  // namespace

TEST_CASE("layers without a deterministic order are refused by name") {
  using column_linear = linear<float, policy<rows_split, column, wide>>;
  using row_linear = linear<float, policy<wide, row, rows_split>>;
  CHECK(is_refused(
      two{1, 1},
      "layer: deterministic sums need a device whose products have one order: set its options::deterministic",
      [](const auto& ctx) { column_linear(ctx, "layer"); }, {}));
  CHECK(is_refused(two{1, 2}, "layer: deterministic sums have no order for linears whose collectives go in chunks",
                   [](const auto& ctx) { column_linear(ctx, "layer", {.overlap = 2}); }));
  CHECK(is_refused(megatron_sp::mesh{1, 1, 1, 1}, "attention: deterministic sums have no order for attention sinks",
                   [](const auto& ctx) { self_attention<float, four_axes, cpu>(ctx, "attention", {.sinks = true}); }));
  CHECK(is_refused(two{1, 1}, "have no order for low-rank adapters",
                   [](const auto& ctx) { column_linear(ctx, "layer", {.lora = {.rank = 2}}); }));
  CHECK(is_refused(two{1, 2}, "a sum over ranks of tp stays partial, which has no deterministic order",
                   [](const auto& ctx) {
                     linear<float, policy<wide, row, spec<shard<batch, dp>, seq, hidden, partial<tp>>>>(ctx, "layer");
                   }));
  CHECK(is_refused(two{1, 2}, "deterministic_leaves::features = 3), which 2 ranks of tp cannot divide",
                   [](const auto& ctx) { row_linear(ctx, "layer"); }, {.deterministic = true}, {3, 4, 4, 1}));
  CHECK(is_refused(two{1, 3},
                   "layer: output: deterministic sums cut ffn = 40 into 4 leaves (deterministic_leaves::features = 4), "
                   "which 3 ranks of tp cannot divide; legal are features with a common divisor with 40 that is a "
                   "multiple of 8, or ffn in blocks of 10 (dim_sizes::set)",
                   [](const auto& ctx) { row_linear(ctx, "layer"); }));
  dim_sizes other_leaves = sizes();
  other_leaves.set(dim_of<heads>, 16, 4), other_leaves.set(dim_of<kv_heads>, 8);
  CHECK(is_refused(
      megatron_sp::mesh{1, 1, 3, 1},
      "deterministic sums join 8 leaves of heads = 16 with as many of kv_heads = 8, and one of 3 ranks of tp has "
      "others "
      "of these; legal are blocks of 2 and 1 (dim_sizes::set)",
      [](const auto& ctx) { self_attention<float, four_axes>(ctx, "attention", attention_options{}); },
      {.deterministic = true}, {8, 4, 2, 1}, other_leaves));
  CHECK(is_refused(
      two{1, 2}, "norm: deterministic sums have no order for norms of rows that ranks share",
      [](const auto& ctx) { rms_norm<float, spec<shard<batch, dp>, seq, shard<hidden, tp>>>(ctx, 1e-5, "norm"); }));
  CHECK(is_refused(two{1, 2}, "moved: deterministic sums have no order for this sum over ranks: reduce_scatter",
                   [](const auto& ctx) { redistribution<float, rows_pending, rows_split>(ctx, "moved"); }));
  CHECK(
      is_refused(two{1, 1},
                 "data parallelism: deterministic sums have no order for gradient_wire::bf16, which rounds gradients; "
                 "legal is full",
                 [](const auto& ctx) {
                   parameter_units<float, cpu>(ctx, zero_level::replicated, {}, bucket_cut::even, gradient_wire::bf16);
                 }));
}

TEST_CASE("a linear whose weight or bias is frozen trains for several steps") {
  for (const bool weight : {false, true})
    CHECK(refusal(
              two{1, 2},
              [weight](const auto& ctx) {
                linear<float, policy<rows_split, column, wide, true>> layer(ctx, "layer");
                layer.visit([&](auto& p) {
                  p.initialize(ctx);
                  if ((p.name() == "layer.weight") == weight) p.freeze();
                  p.gather(ctx);
                });
                const tensor<float, rows_split> x(ctx);
                const tensor<float, dual_t<wide>> dy(ctx);
                kernels::fill(ctx.device, const_cast<float*>(x.data()), x.size(), 1.0f);
                kernels::fill(ctx.device, const_cast<float*>(dy.data()), dy.size(), 1.0f);
                for (int step = 0; step < 2; ++step) {
                  layer.visit([&](auto& p) { p.zero_gradient(ctx); });
                  typename decltype(layer)::saved kept;
                  layer.forward(ctx, x, &kept);
                  layer.backward(ctx, x, kept, dy);
                  layer.visit([&](auto& p) {
                    if (p.trainable()) static_cast<void>(p.reduce(ctx));
                  });
                }
              },
              {.deterministic = true}, order) == "");
}

TEST_CASE("attention on the caller's arrays is refused if a rank's tokens are not whole chunks") {
  using along = plait::mesh<axis<cp>>;
  const auto made = [](deterministic_leaves of, bool zigzag) {
    const auto make = [&](const context<cpu>& ctx) {
      const sequence_order text = zigzag ? sequence_order::zigzag(16, 2) : sequence_order::original(16);
      const kernels::attention_shape shape{.batch = 1, .heads = 2, .kv_heads = 2, .head_dim = 4, .scale = 1};
      context_attention<double, ring<cp>>(ctx, shape, text);
      context_attention<double, all_gather_kv<cp>>(ctx, shape, text);
    };
    return refusal(along(2), make, {.deterministic = true}, of);
  };
  CHECK(made({4, 4, 4, 1}, true) == "");
  CHECK(made({4, 4, 2, 1}, false) == "");
  CHECK(has(made({4, 4, 1, 1}, false),
            "chunks of 16 tokens (deterministic_leaves::sequence), and a rank has a run of 8 from 0"));
  CHECK(
      has(made({4, 4, 2, 1}, true), "chunks of 8 tokens (deterministic_leaves::sequence), and a rank has a run of 4"));
}

TEST_CASE("a layer that adds to gradients in its own order is refused by its parameter") {
  CHECK(is_refused(two{1, 1},
                   "parameter layer.weight: its layer adds to the gradient in an order that depends on the layout",
                   [](const auto& ctx) {
                     linear<float, policy<rows_split, column, wide>> layer(ctx, "layer");
                     layer.visit([&](auto& p) { p.zero_gradient(ctx); });
                     layer.weight()->used_gradient(ctx.device);
                   }));
}

TEST_CASE("a layer that starts to use a weight under data parallelism is refused, as its sums would be missed") {
  CHECK(is_refused(two{2, 1},
                   "parameter layer.weight: a layer begins to use it after data parallelism has put it into a bucket",
                   [](const auto& ctx) {
                     using head = linear<float, policy<rows_split, column, wide>>;
                     head layer(ctx, "layer");
                     parameter_units<float, cpu> units(ctx, zero_level::optimizer, {});
                     units.add(ctx, 0, [&](auto&& f) { layer.visit(f); });
                     head(ctx, "other", {.tied = layer.weight()});
                   }));
}
