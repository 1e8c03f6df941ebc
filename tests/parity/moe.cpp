// timeout: 300
// program: mixtures
// A language model of mixtures of experts equals one rank in double: on meshes of dp x ep x tp, at every ZeRO level and
// as a pipeline. Experts are sharded over their own axis, or over tp as well.
#include "plait/nn/moe.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <string>

#include "plait/models/language_model.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/norm.hpp"
#include "plait/schedule/generators.hpp"
#include "support/model_parity.hpp"
#include "support/split_strategy.hpp"

using namespace plait;
using namespace plait::testing;

namespace {

// Samples are sharded over dp and ep, tokens over tp; experts are sharded over ep, and each expert over tp.
struct beside_tp : test::split {
  using mesh = plait::mesh<axis<dp>, axis<ep>, axis<tp>>;
  using residual = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
  using of_experts = spec<shard<experts, ep>, shard<ffn, tp>, hidden>;
};
// Experts are sharded over ep and tp; attention is tensor-parallel.
struct folded : beside_tp {
  using of_experts = spec<shard<experts, ep, tp>, ffn, hidden>;
};

template <class S, class D>
struct layers {
  using specs = transformer_specs<S>;
  using norm = rms_norm<double, typename specs::residual, D>;
  using attention = self_attention<double, S, D>;
  using mixture = moe<double, layer_policy<typename S::residual, typename S::of_experts, typename S::residual>, D>;
  using block = sequential<residual<norm, attention>, residual<norm, mixture>>;
  using table = embedding<double, typename specs::embedding, D>;
  using output = linear<double, typename specs::head, D>;
  using head = sequential<norm, output>;
  using loss = cross_entropy_loss<double, typename specs::logits, typename specs::tokens, D>;
  using model = language_model<table, block, head, loss>;
};

constexpr std::int64_t tokens = 32, width = 16, length = 8;

// The layers starting with index `from` have auxiliary losses.
template <class S>
auto maker(layer_recompute keep = {}, const router_losses& losses = {}, std::int64_t from = 0) {
  return [=](const auto& ctx, stage_layers part, auto first) {
    using l = layers<S, device_of<decltype(ctx)>>;
    return std::make_unique<typename l::model>(
        ctx, tokens, part, language_model_options{.keep = keep, .order = sequence_order::original(length)}, first,
        [&] {
          return typename l::table(ctx, tokens, "table", {.init = {0, 0.5}});
        },
        [&](std::int64_t i) {
          const std::string name = "layers." + std::to_string(i);
          return typename l::block(
              {typename l::norm(ctx, 1e-6, name + ".norm"),
               typename l::attention(ctx, name + ".attention", {.init = {0, 0.3}})},
              {typename l::norm(ctx, 1e-6, name + ".experts_norm"),
               typename l::mixture(
                   ctx, name + ".experts",
                   {.router = {.chosen = 2}, .init = {0, 0.3}, .losses = i < from ? router_losses{} : losses})});
        },
        [&](const auto& of_head, const auto&) {
          return typename l::head(typename l::norm(of_head, 1e-6, "norm"), typename l::output(of_head, "head"));
        });
  };
}

model_setup setup() {
  model_setup how;
  how.sizes = [](const mesh_shape&, std::int64_t samples) {
    return sizes_of<batch, seq, hidden, heads, kv_heads, head_dim, ffn, vocab, experts>(samples, length, width, 4, 4, 4,
                                                                                        16, tokens, 8);
  };
  how.layers = 2, how.vocab = tokens, how.ragged = true;
  how.parallel.axes.shard = axis_list(axis_of<dp>, axis_of<ep>);
  return how;
}

mesh_shape flat(std::int64_t d, std::int64_t e, std::int64_t t) { return beside_tp::mesh{d, e, t}.shape(); }

}  // namespace

TEST_CASE("experts over an axis that shards samples, at every level of ZeRO") {
  model_setup how = setup();
  auto make = maker<beside_tp>();
  CHECK(check_model(flat(1, 1, 1), {flat(1, 2, 1), flat(1, 1, 2), flat(2, 2, 2), flat(1, 4, 2)}, how, make).text() ==
        "");
  for (const zero_level level : {zero_level::optimizer, zero_level::gradients, zero_level::parameters}) {
    how.parallel.parallel.level = level;
    CHECK(check_model(flat(1, 1, 1), {flat(1, 2, 1), flat(2, 2, 1), flat(2, 2, 2), flat(4, 1, 1)}, how, make).text() ==
          "");
  }
}

TEST_CASE("the gradient norm is that of all gradients, including experts'") {
  model_setup how = setup();
  auto make = maker<beside_tp>();
  findings found;
  const model_outcome one = train_alone(flat(1, 1, 1), how, make, found);
  double squares = 0;
  for (const named_values& g : one.last_gradients) squares += norm_of(g.values) * norm_of(g.values);
  CHECK(std::abs(one.steps.back().gradient_norm - std::sqrt(squares)) < 1e-12 * std::sqrt(squares));
  CHECK(found.text() == "");
}

TEST_CASE("experts over tp as well, with recomputation") {
  for (const recompute keep : {recompute::none, recompute::full}) {
    auto make = maker<folded>({keep});
    CHECK(check_model(flat(1, 1, 1), {flat(1, 1, 2), flat(1, 2, 2), flat(2, 2, 2), flat(1, 2, 4)}, setup(), make)
              .text() == "");
  }
}

TEST_CASE("auxiliary losses, with recomputation, more microbatches, and ZeRO") {
  const router_losses losses{.balance = {0.5}, .z_loss = 0.1};
  model_setup how = setup();
  auto make = maker<beside_tp>({}, losses), again = maker<beside_tp>({recompute::full}, losses);
  findings found;
  const model_outcome one = train_alone(flat(1, 1, 1), how, make, found);
  for (const mesh_shape& mesh : {flat(1, 2, 1), flat(1, 1, 2), flat(2, 2, 2)})
    found.add(check_model_on(mesh, how, one, make), "none");
  for (const mesh_shape& mesh : {flat(1, 1, 1), flat(2, 1, 2)})
    found.add(check_model_on(mesh, how, one, again), "full");
  how.microbatches = 4;
  found.add(check_model_on(flat(1, 2, 2), how, one, again), "4 microbatches");
  how.parallel.parallel.level = zero_level::parameters;
  found.add(check_model_on(flat(2, 1, 1), how, one, make), "ZeRO 3");
  CHECK(found.text() == "");
}

TEST_CASE("pipelines, with deferred weight gradients and auxiliary losses") {
  model_setup how = setup();
  how.microbatches = 4, how.layers = 4;
  auto make = maker<beside_tp>({}, {.balance = {0.5, balance_over::microbatch}, .z_loss = 0.1});
  findings found;
  const model_outcome one = train_alone(flat(1, 1, 1), how, make, found);
  const auto check = [&](const schedule& plan, std::int64_t d, std::int64_t e, std::int64_t t) {
    const mesh_shape whole = mesh<axis<dp>, axis<pp>, axis<ep>, axis<tp>>{d, 2, e, t}.shape();
    found.add(check_model_on(whole, how, one, make, &plan), "pipeline");
  };
  check(make_schedule<one_f_one_b>(2, 4), 1, 2, 2);
  check(make_schedule<zb_v>(2, 4), 1, 2, 4);
  CHECK(found.text() == "");
}

TEST_CASE("auxiliary losses in one stage only") {
  model_setup how = setup();
  auto make = maker<beside_tp>({}, {.balance = {0.5}}, 1);
  findings found;
  const model_outcome one = train_alone(flat(1, 1, 1), how, make, found);
  for (const step_result& step : one.steps)
    CHECK((step.auxiliary > 0.4 && step.auxiliary < 0.9));  // each layer counts from zero
  const schedule plan = make_schedule<one_f_one_b>(2, 2);
  found.add(check_model_on(mesh<axis<dp>, axis<pp>, axis<ep>, axis<tp>>{1, 2, 2, 1}.shape(), how, one, make, &plan),
            "pipeline");
  CHECK(found.text() == "");
}
