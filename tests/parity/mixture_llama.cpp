// timeout: 600
// program: mixtures
// A Llama with experts, a shared expert and auxiliary losses equals one rank in double, and transformers' models to the
// rounding of the stored values. Meshes are dp x ep x cp x tp of up to 16 ranks. Tests every ZeRO level and every mode
// of recomputation, and pipelines.
#include "plait/models/mixture_llama.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/tensor_names.hpp"
#include "plait/schedule/generators.hpp"
#include "support/golden_mixtures.hpp"
#include "support/model_parity.hpp"

using namespace plait;
using namespace plait::testing;

namespace {

llama_config tiny_mixture() {
  return {.vocab = 29,
          .hidden = 16,
          .layers = 2,
          .heads = 8,
          .kv_heads = 4,
          .head_dim = 4,
          .ffn = 9,
          .qkv_bias = true,
          .initializer_range = 0.3,
          .mixture = {.experts = 8, .router = {.chosen = 3}, .shared_ffn = 8, .shared_gate = true}};
}

/// A model with DeepSeek-V3's router, whose biases change in each step, and a first layer without experts.
llama_config tiny_dots() {
  llama_config c = tiny_mixture();
  c.qkv_bias = false, c.qk_norm = true;
  c.mixture.router.scores = kernels::expert_scores::sigmoid;
  c.mixture.router.scale = 2.5;
  c.mixture.router.groups = 4, c.mixture.router.chosen_groups = 2;
  c.mixture.router.group_scores = kernels::group_scores::two_largest;
  c.mixture.correction_bias = true, c.mixture.shared_gate = false;
  c.mixture.dense_layers = 1, c.mixture.dense_ffn = 24;
  return c;
}

constexpr double bias_rate = 0.03125;

template <class S>
auto maker(llama_config config, layer_recompute keep = {}, double limit = 0, std::int64_t rank = 0,
           balance_over over = balance_over::sequence, bool padded = false) {
  return [=](const auto& ctx, stage_layers part, auto first) {
    using model = mixture_llama<double, S, device_of<decltype(ctx)>>;
    const lora_options adapter{.rank = rank, .scale = 2, .init = {0, 0.3}};
    const llama_options options{.keep = keep,
                                .mlp = {.gate = adapter, .up = adapter, .down = adapter},
                                .experts = {.gate = adapter, .up = adapter, .down = adapter},
                                .mixture_losses = {.balance = {0.1, over}, .z_loss = 0.01},
                                .expert_limit = limit,
                                .padded_experts = padded,
                                .expert_bias_rate = config.mixture.correction_bias ? bias_rate : 0};
    auto made = std::make_unique<model>(ctx, config, options, part, first);
    if (rank > 0) freeze_all_but_adapters(*made);
    return made;
  };
}

model_setup setup(const llama_config& config) {
  model_setup how;
  how.sizes = [=](const mesh_shape& mesh, std::int64_t samples) {
    return llama_sizes<megatron_experts>(config, mesh, samples, 17);
  };
  how.layers = config.layers, how.vocab = config.vocab, how.ragged = true;
  how.batch = 16, how.microbatches = 2, how.steps = 2;
  return how;
}

mesh_shape mesh_of(std::int64_t d, std::int64_t e, std::int64_t c, std::int64_t t) {
  return megatron_experts::mesh{d, e, c, t, 1}.shape();
}

/// The loss of one rank with a limit of rows.
double train_alone_loss(double limit) {
  auto make = maker<megatron_experts>(tiny_mixture(), {}, limit);
  findings found;
  return train_alone(mesh_of(1, 1, 1, 1), setup(tiny_mixture()), make, found).steps.back().loss;
}

}  // namespace

namespace {

/// Compares all meshes of up to 16 ranks with one rank. On every second mesh, the rows of experts are padded.
void check_all_meshes(const llama_config& config, double limit) {
  model_setup how = setup(config);
  auto make = maker<megatron_experts>(config, {}, limit);
  findings found;
  const model_outcome one = train_alone(mesh_of(1, 1, 1, 1), how, make, found);
  int meshes = 0;
  for (const std::int64_t d : {1, 2, 4})
    for (const std::int64_t e : {1, 2, 4, 8})
      for (const std::int64_t c : {1, 2, 4})
        for (const std::int64_t t : {1, 2, 4}) {
          if (d * e * c * t > 16 || d * e > 8) continue;
          how.parallel.parallel.level = d * e * c > 1 ? static_cast<zero_level>(meshes % 4) : zero_level::replicated;
          const auto keep = static_cast<recompute>(meshes / 4 % 3);
          auto same = maker<megatron_experts>(config, {keep}, limit, 0, balance_over::sequence, meshes % 2 == 1);
          found.add(check_model_on(mesh_of(d, e, c, t), how, one, same), cat({d, " x ", e, " x ", c, " x ", t}));
          ++meshes;
        }
  // Three ranks have unequal numbers of experts.
  how.parallel.parallel.level = zero_level::parameters;
  for (const mesh_shape& mesh : {mesh_of(1, 3, 1, 2), mesh_of(2, 3, 2, 1)})
    found.add(check_model_on(mesh, how, one, make), describe(mesh));
  CHECK(found.text() == "");
  CHECK(meshes >= 40);
}

}  // namespace

TEST_CASE("all meshes of up to 16 ranks, without a limit of rows") { check_all_meshes(tiny_mixture(), 0); }
TEST_CASE("all meshes of up to 16 ranks, with a limit of rows, and a bias that each step changes") {
  check_all_meshes(tiny_dots(), 1.0);
}

TEST_CASE("logits, loss and gradients of transformers' models, which are stored in float") {
  plait::test::check_golden_mixtures<double, megatron_experts>({mesh_of(1, 1, 1, 1), mesh_of(1, 2, 2, 2)}, 1e-7, 1e-7);
}

TEST_CASE("with a limit of rows, in original and in zigzag order") {
  const auto check = [](auto make, const model_setup& how) {
    CHECK(check_model(
              mesh_of(1, 1, 1, 1),
              {mesh_of(2, 1, 1, 1), mesh_of(1, 2, 2, 2), mesh_of(1, 1, 4, 1), mesh_of(2, 2, 1, 4), mesh_of(1, 3, 2, 2)},
              how, make)
              .text() == "");
  };
  check(maker<megatron_experts>(tiny_mixture(), {}, 1.0), setup(tiny_mixture()));
  using zigzag_experts = context_parallel<megatron_experts, ring<cp>, zigzag>;
  check(maker<zigzag_experts>(tiny_dots(), {recompute::full}, 0.75), setup(tiny_dots()));
  CHECK(train_alone_loss(0.5) != train_alone_loss(0));
}

TEST_CASE("experts over the tensor-parallel axes, without a gate, with norms of queries and keys over all heads") {
  llama_config config = tiny_mixture();
  config.mixture.shared_gate = false;
  config.qkv_bias = false, config.qk_norm = config.qk_norm_over_heads = true;
  auto make = maker<experts_over_tp<megatron_experts>>(config, {recompute::full});
  CHECK(check_model(mesh_of(1, 1, 1, 1), {mesh_of(1, 1, 1, 2), mesh_of(1, 2, 2, 2), mesh_of(2, 1, 1, 4)}, setup(config),
                    make)
            .text() == "");
}

namespace {

/// Experts over ranks of data and of context parallelism, each whole on its rank.
struct experts_over_dp_and_cp : megatron_experts {
  using expert = shard<experts, dp, cp>;
  using expert_feed_forward = ffn;
};
/// tp shards experts, and tp_rep the width of each: an expert is on fewer ranks than attention.
struct experts_on_fewer_ranks : megatron_experts {
  using expert = shard<experts, ep, tp>;
  using expert_feed_forward = shard<ffn, tp_rep>;
};

}  // namespace

TEST_CASE("experts over ranks of dp and cp, and experts sharded over fewer ranks than attention, at levels of ZeRO") {
  model_setup how = setup(tiny_dots());
  auto borrowed = maker<experts_over_dp_and_cp>(tiny_dots());
  auto fewer = maker<experts_on_fewer_ranks>(tiny_dots());
  findings found;
  const model_outcome one = train_alone(mesh_of(1, 1, 1, 1), how, borrowed, found);
  for (const zero_level level : {zero_level::replicated, zero_level::optimizer, zero_level::parameters}) {
    how.parallel.parallel.level = level;
    for (const mesh_shape& mesh : {mesh_of(2, 1, 1, 1), mesh_of(2, 2, 2, 1), mesh_of(1, 2, 4, 2)})
      found.add(check_model_on(mesh, how, one, borrowed), "dp and cp");
    for (const mesh_shape& mesh :
         {megatron_experts::mesh{1, 2, 1, 2, 2}.shape(), megatron_experts::mesh{2, 1, 1, 2, 2}.shape()})
      found.add(check_model_on(mesh, how, one, fewer), "fewer ranks");
  }
  CHECK(found.text() == "");
}

TEST_CASE("Muon for each matrix of an expert, and AdamW with moments of 8 bits") {
  llama_config config = tiny_dots();
  config.ffn = 16;  // so that the matrix of an expert is one block of 8-bit moments
  model_setup how = setup(config);
  auto make = maker<megatron_experts>(config);
  const auto check = [&](const optimizer_options& optimizer, bucket_cut cut, std::initializer_list<mesh_shape> meshes) {
    how.optimizer = optimizer, how.parallel = {}, how.steps = 3;
    findings found;
    const model_outcome one = train_alone(mesh_of(1, 1, 1, 1), how, make, found);
    for (const zero_level level : {zero_level::replicated, zero_level::optimizer, zero_level::parameters}) {
      how.parallel.parallel.level = level;
      if (level != zero_level::replicated) how.parallel.cut = cut;
      for (const mesh_shape& mesh : meshes)
        found.add(check_model_on(mesh, how, one, make), cat({"ZeRO ", static_cast<int>(level)}));
    }
    CHECK(found.text() == "");
  };
  check(muon_options{}, bucket_cut::whole, {mesh_of(1, 2, 1, 2), mesh_of(2, 3, 1, 1), mesh_of(1, 2, 2, 4)});
  check(adamw_options{.moments = moment_type::int8}, bucket_cut::blocks(256),
        {mesh_of(1, 2, 1, 1), mesh_of(2, 4, 1, 1), mesh_of(1, 2, 2, 1)});
}

TEST_CASE("experts balanced by a bias and a loss over steps, which recomputation and microbatches do not change") {
  model_setup how = setup(tiny_dots());
  how.steps = 5, how.clip = 0;
  auto make = maker<megatron_experts>(tiny_dots(), {}, 0, 0, balance_over::step);
  auto again = maker<experts_over_tp<megatron_experts>>(tiny_dots(), {recompute::full}, 0, 0, balance_over::step);
  findings found;
  const model_outcome one = train_alone(mesh_of(1, 1, 1, 1), how, make, found);
  int states = 0;
  for (const named_values& w : one.weights) {
    double most = 0, sum = 0;
    for (const double x : w.values) most = std::max(most, std::abs(x)), sum += x;
    if (is_last_load(w.name)) {
      ++states;
      CHECK(most > 1.01);
      CHECK(sum == doctest::Approx(8).epsilon(1e-12));
    } else if (w.name.ends_with("e_score_correction_bias")) {
      ++states;
      CHECK((most >= 3 * bias_rate && most <= 5 * bias_rate));
      for (const double b : w.values) CHECK(b / bias_rate == std::round(b / bias_rate));  // a whole number of changes
    }
  }
  CHECK(states == 2);
  for (const mesh_shape& mesh : {mesh_of(1, 2, 1, 1), mesh_of(2, 2, 2, 2)})
    found.add(check_model_on(mesh, how, one, make), "none");
  how.microbatches = 4;
  found.add(check_model_on(mesh_of(1, 4, 1, 2), how, one, again), "recomputation, 4 microbatches");
  using whole = mesh<axis<dp>, axis<pp>, axis<ep>, axis<cp>, axis<tp>, axis<tp_rep>>;
  const schedule plan = make_schedule<one_f_one_b>(2, 4);
  found.add(check_model_on(whole{1, 2, 2, 1, 2, 1}.shape(), how, one, make, &plan), "pipeline");
  how.microbatches = 1;
  for (const zero_level level : {zero_level::optimizer, zero_level::parameters}) {
    how.parallel.parallel.level = level;
    found.add(check_model_on(mesh_of(2, 1, 2, 1), how, one, make), "ZeRO, 1 microbatch");
  }
  CHECK(found.text() == "");
}

// The first update makes weights so large that the gradients of later steps are not finite.
TEST_CASE("a skipped step changes no state of a router") {
  model_setup how = setup(tiny_dots());
  auto make = maker<megatron_experts>(tiny_dots(), {}, 0, 0, balance_over::step);
  const auto states_after = [&](std::int64_t steps) {
    how.steps = steps, how.learning_rate = 1e300;
    const model_outcome one = std::move(train_on(mesh_of(1, 1, 1, 1), how, make)[0]);
    for (std::size_t i = 0; i < one.steps.size(); ++i) CHECK(one.steps[i].skipped == (i > 0));
    std::vector<std::vector<double>> states;
    for (const named_values& w : one.weights)
      if (is_last_load(w.name) || w.name.ends_with("e_score_correction_bias")) states.push_back(w.values);
    return states;
  };
  const auto after_one = states_after(1);
  CHECK(after_one.size() == 2);
  CHECK(states_after(3) == after_one);
}

TEST_CASE("pipelines with a stage without experts, and a balance over microbatches") {
  llama_config config = tiny_dots();
  config.layers = 4;
  model_setup how = setup(config);
  how.microbatches = 4;
  auto make = maker<megatron_experts>(config, {}, 0, 0, balance_over::microbatch);
  findings found;
  const model_outcome one = train_alone(mesh_of(1, 1, 1, 1), how, make, found);
  using whole = mesh<axis<dp>, axis<pp>, axis<ep>, axis<cp>, axis<tp>, axis<tp_rep>>;
  for (const schedule& plan : {make_schedule<one_f_one_b>(2, 4), make_schedule<zb_v>(2, 4)})
    for (const whole& ranks : {whole{1, 2, 2, 2, 1, 1}, whole{2, 2, 1, 1, 2, 1}, whole{1, 2, 4, 1, 2, 1}})
      found.add(check_model_on(ranks.shape(), how, one, make, &plan), "pipeline");
  const schedule plan = make_schedule<one_f_one_b>(4, 4);
  found.add(check_model_on(whole{1, 4, 2, 1, 2, 1}.shape(), how, one, make, &plan), "four stages");
  for (const schedule& other : {make_schedule<gpipe>(2, 4), make_schedule<interleaved<2>>(2, 4),
                                make_schedule<zb_h1>(2, 4), make_schedule<zb_h2>(2, 4), make_schedule<v_half>(2, 4),
                                make_schedule<v_min>(2, 4), make_schedule<dualpipe_v>(2, 4)})
    found.add(check_model_on(whole{1, 2, 2, 1, 2, 1}.shape(), how, one, make, &other), "another schedule");
  CHECK(found.text() == "");
}

TEST_CASE("adapters of experts only, on meshes, at levels of ZeRO, with recomputation and as a pipeline") {
  model_setup how = setup(tiny_dots());
  how.steps = 3;
  auto make = maker<megatron_experts>(tiny_dots(), {recompute::full}, 0, 2);
  findings zeros, found;  // B is zero at first, so A has no gradient in the first step
  const model_outcome one = train_alone(mesh_of(1, 1, 1, 1), how, make, zeros);
  CHECK(one.steps.back().loss < one.steps.front().loss);
  for (const zero_level level : {zero_level::optimizer, zero_level::gradients, zero_level::parameters}) {
    how.parallel.parallel.level = level;
    for (const mesh_shape& mesh : {mesh_of(1, 2, 1, 2), mesh_of(2, 2, 2, 1)})
      found.add(check_model_on(mesh, how, one, make), describe(mesh));
  }
  how.parallel.parallel.level = zero_level::replicated;
  using whole = mesh<axis<dp>, axis<pp>, axis<ep>, axis<cp>, axis<tp>, axis<tp_rep>>;
  const schedule plan = make_schedule<zb_h1>(2, 2);
  found.add(check_model_on(whole{1, 2, 2, 1, 2, 1}.shape(), how, one, make, &plan), "pipeline");
  CHECK(found.text() == "");
}
