// program: layers
// Mixtures of experts: finite differences on one rank, meshes equal one rank.
#include "plait/nn/moe.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "plait/checkpoint/model_weights.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/moe/expert_mlp.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "support/layer_check.hpp"
#include "support/on_mesh.hpp"
#include "support/split_strategy.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Sizes for which most ranks have uneven parts.
dim_sizes mixture_sizes() {
  dim_sizes s = transformer_sizes(5, 9);
  s.set(dim_of<experts>, 8);
  s.set(dim_of<ffn>, 17);
  return s;
}
dim_sizes even_sizes() {
  dim_sizes s = transformer_sizes(4, 8);
  s.set(dim_of<experts>, 8);
  return s;
}

// Experts over ep, which also shards tokens, and data parallelism over dp. With tensor parallelism as in Megatron: tp
// shards the sequence, and each expert.
using three = mesh<axis<dp>, axis<ep>, axis<tp>>;
struct exchanged {
  using input = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
  using weight = spec<shard<experts, ep>, shard<ffn, tp>, hidden>;
  using output = input;
};
// Without sequence parallelism.
struct sequence_on_all_ranks {
  using input = spec<shard<batch, dp, ep>, seq, hidden, invariant<tp>>;
  using weight = spec<shard<experts, ep>, shard<ffn, tp>, hidden>;
  using output = input;
};
// Experts over both axes, each expert whole on its rank.
struct folded {
  using input = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
  using weight = spec<shard<experts, tp, ep>, ffn, hidden>;
  using output = input;
};
// Tokens are replicated over ep, and each rank computes its own experts; over tp rows are exchanged.
struct masked {
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden, invariant<ep>>;
  using weight = spec<shard<experts, ep, tp>, ffn, hidden>;
  using output = input;
};

// Sequences are sharded over two axes, and experts over the same.
struct long_sequences {
  using input = spec<shard<batch, dp>, shard<zseq, ep, tp>, hidden>;
  using weight = spec<shard<experts, tp>, ffn, hidden>;
  using output = input;
};
// Ranks along ep each compute a part of the gradient of replicated weights.
struct masked_and_replicated {
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden, replicate<ep>>;
  using weight = spec<shard<experts, ep>, ffn, hidden>;
  using output = spec<shard<batch, dp>, shard<seq, tp>, hidden, invariant<ep>>;
};

constexpr deterministic_leaves leaves_of_four{4, 4, 4};

/// Returns the values of one rank, where all policies have equal ones for options of this name.
template <class Policy>
const layer_values& check_mixture(const char* name, const moe_options& how, std::initializer_list<three> meshes) {
  const auto make = [how](const auto& ctx) {
    return moe<double, Policy, device_of<decltype(ctx)>>(ctx, "mixture", how);
  };
  const layer_values& one = check_once(name, three{1, 1, 1}, mixture_sizes(), make, 25);
  check_meshes(meshes, mixture_sizes(), one, make);
  return one;
}

}  // namespace

TEST_CASE("experts with exchanged rows") {
  check_mixture<exchanged>(
      "plain", {},
      {three{2, 1, 1}, three{1, 2, 1}, three{1, 1, 2}, three{2, 2, 2}, three{1, 4, 2}, three{1, 3, 1}, three{1, 5, 2}});
}
TEST_CASE("experts of whole sequences, one for each token") {
  check_mixture<sequence_on_all_ranks>("one for each token", {{.chosen = 1, .normalised = false}},
                                       {three{2, 2, 1}, three{1, 1, 4}, three{1, 2, 2}, three{2, 2, 2}});
}
TEST_CASE("experts over two axes, with sigmoids for scores") {
  check_mixture<folded>(
      "sigmoids", {{.chosen = 3, .scores = kernels::expert_scores::sigmoid, .scale = 2.5}},
      {three{1, 1, 2}, three{1, 2, 2}, three{2, 2, 2}, three{1, 4, 2}, three{1, 3, 2}, three{2, 1, 7}});
}
TEST_CASE("experts of the best groups") {
  check_mixture<exchanged>(
      "groups", {{.chosen = 3, .groups = 4, .chosen_groups = 2, .group_scores = kernels::group_scores::two_largest}},
      {three{2, 1, 1}, three{1, 2, 1}, three{2, 2, 2}});
}
TEST_CASE("experts of tokens that all ranks have") {
  check_mixture<masked>(
      "four for each token", {{.chosen = 4, .normalised = false}},
      {three{1, 2, 1}, three{1, 2, 2}, three{2, 2, 2}, three{1, 4, 2}, three{1, 3, 1}, three{2, 3, 2}});
}
TEST_CASE("padded rows give the results of counted rows") {
  check_mixture<exchanged>("plain", {.padded = true}, {three{1, 2, 1}, three{2, 2, 2}, three{1, 3, 2}});
  check_mixture<masked>("four for each token", {.router = {.chosen = 4, .normalised = false}, .padded = true},
                        {three{1, 2, 2}, three{2, 3, 2}});
  for (const double factor : {0.5, 1.25}) {
    const std::string name = cat({"a limit of ", factor});
    check_mixture<exchanged>(name.c_str(), {.limit = {factor}}, {three{2, 2, 2}});
    check_mixture<exchanged>(name.c_str(), {.limit = {factor}, .padded = true}, {three{2, 2, 2}, three{1, 3, 1}});
    check_mixture<folded>(name.c_str(), {.limit = {factor}, .padded = true}, {three{1, 2, 2}, three{2, 1, 3}});
  }
}
TEST_CASE("padded rows have sizes that no choice changes, and no pass sends counts") {
  for (const three& mesh : {three{1, 4, 1}, three{2, 2, 2}})
    on_mesh(mesh, even_sizes(), 1, [](const context<cpu>& ctx) {
      moe<double, exchanged> layer(ctx, "moe", {.limit = {1.5}, .padded = true});
      fill_parameters(ctx, layer, {});
      const auto x = place_full<exchanged::input>(ctx, random_full(layout_v<exchanged::input>, ctx.sizes, 1));
      ctx.ranks.ledger().clear();
      moe<double, exchanged>::saved kept;
      const auto y = layer.forward(ctx, x, &kept);
      layer.backward(ctx, x, kept, y);
      // An expert takes 3 rows of a sequence of 8. After tp gathers them, sequences are whole.
      const mesh_shape& shape = ctx.ranks.shape();
      const std::int64_t sequences = 4 / shape.size(axis_list(axis_of<dp>, axis_of<ep>)), rows = 8 * 3 * sequences;
      const auto bytes = static_cast<std::int64_t>(ctx.ranks.ledger().total("ep", collective::all_to_all).payload);
      CHECK(bytes == 4 * rows * ctx.sizes.of(dim_of<hidden>) * static_cast<std::int64_t>(sizeof(double)));
    });
}

namespace {

const mlp_lora three_adapters{.gate = {.rank = 2, .scale = 2}, .up = {.rank = 3}, .down = {.rank = 2, .scale = 0.5}};

struct adapted_mixture : moe<double, exchanged> {
  using precision_type = double;
  using moe::moe;
};

}  // namespace

TEST_CASE("adapters of experts with exchanged rows, sharded, over two axes, and of tokens that all ranks have") {
  const moe_options how{.router = {.chosen = 3}, .lora = three_adapters};
  const layer_values& one = check_mixture<exchanged>(
      "adapters", how, {three{2, 1, 1}, three{1, 2, 1}, three{1, 1, 2}, three{2, 2, 2}, three{1, 4, 2}});
  CHECK(one.gradients.size() == 7);  // the router's and each adapter's: the experts' weights are frozen
  for (std::size_t i = 1; i < one.gradients.size(); ++i) {
    CAPTURE(one.gradients[i].first);
    const std::string matrix = std::array{"gate_proj", "up_proj", "down_proj"}[(i - 1) / 2];
    CHECK(one.gradients[i].first == cat({"mixture.experts.", matrix, i % 2 == 1 ? ".lora_A" : ".lora_B", ".weight"}));
  }
  check_mixture<sequence_on_all_ranks>("adapters", how, {three{1, 1, 4}, three{2, 2, 2}});
  check_mixture<folded>("adapters", how, {three{1, 1, 2}, three{2, 2, 2}, three{1, 4, 2}});
  check_mixture<masked>("adapters", how, {three{1, 2, 1}, three{2, 2, 2}});
}
TEST_CASE("adapters give the results of weights that they are merged into") {
  on_mesh(three{1, 1, 1}, mixture_sizes(), 1, [](const context<cpu>& ctx) {
    adapted_mixture adapted(ctx, "moe", {.router = {.chosen = 3}, .lora = three_adapters});
    moe<double, exchanged> plain(ctx, "moe", {.router = {.chosen = 3}});
    fill_parameters(ctx, adapted, {});
    fill_parameters(ctx, plain, {});
    const auto x = place_full<exchanged::input>(ctx, random_full(layout_v<exchanged::input>, ctx.sizes, 1));
    const auto result = [&](auto& layer) { return layer.forward(ctx, x); };
    const auto y = result(adapted), without = result(plain);
    const auto all = plait::detail::gather_adapters(ctx, adapted);
    CHECK(all.size() == 3);
    plain.visit([&](auto& p) {
      if (const auto found = all.find(p.name()); found != all.end())
        found->second.add_to(0, p.value(), p.part().local_size());
      p.gather(ctx);
    });
    const auto merged = result(plain);
    const std::vector<double> values(y.data(), y.data() + y.size());
    check_near(values, {merged.data(), merged.data() + merged.size()}, 1e-13, "merged");
    CHECK(largest_difference(values, {without.data(), without.data() + without.size()}) > 0.01);
  });
}

namespace {

struct beside_tensors : split {
  using mesh = three;
  using residual = spec<shard<batch, dp, ep>, shard<seq, tp>, hidden>;
  using expert = shard<experts, ep>;
};

}  // namespace

TEST_CASE("a shared expert of all tokens, with and without a gate") {
  dim_sizes sizes = mixture_sizes();
  sizes.set(dim_of<shared_ffn>, 12), sizes.set(dim_of<shared_gate>, 1);
  for (const bool gated : {false, true}) {
    const auto make = [=](const auto& ctx) {
      return expert_mlp<double, beside_tensors, device_of<decltype(ctx)>>(ctx, "mlp", {{.chosen = 3}, {0, 0.5}}, true,
                                                                          {{0, 0.5}, gated});
    };
    const layer_values one = check_one(three{1, 1, 1}, sizes, make, 25);
    check_meshes({three{2, 1, 1}, three{1, 2, 1}, three{1, 1, 2}, three{2, 2, 2}}, sizes, one, make);
  }
}

TEST_CASE("auxiliary losses are a part of the objective") {
  const router_losses together{{2, balance_over::microbatch}, 0.2}, over_steps{{2, balance_over::step}};
  const moe_options each{.losses = {.balance = {3}, .z_loss = 0.7}};
  check_mixture<exchanged>("each", each, {three{2, 1, 1}, three{1, 2, 1}, three{1, 1, 2}, three{2, 2, 2}});
  check_mixture<masked_and_replicated>("each", each, {three{1, 2, 1}, three{2, 2, 2}});
  check_mixture<long_sequences>("each", each, {three{1, 2, 1}, three{2, 2, 2}});
  check_mixture<sequence_on_all_ranks>("together",
                                       {.router = {.scores = kernels::expert_scores::sigmoid}, .losses = together},
                                       {three{2, 2, 1}, three{1, 1, 4}, three{2, 2, 2}});
  check_mixture<masked>("three together", {.router = {.chosen = 3}, .losses = together},
                        {three{1, 2, 1}, three{1, 2, 2}, three{2, 2, 2}});
  check_mixture<masked>("over steps", {.losses = over_steps}, {three{1, 2, 2}, three{2, 2, 2}});
}

namespace {

struct trained {
  double auxiliary = 0;
  router_statistics router;  ///< of the second mixture
  std::vector<std::pair<std::string, std::vector<double>>> gradients;
};

// Makes the changes that follow a step.
void end_step(const context<cpu>& ctx, auto& layers) {
  layers.visit([&](auto& p) { p.end_step(ctx); });  // does nothing to a parameter without a change
  gather_parameters(ctx, layers);
}

// Two mixtures, run on the samples of steps in some microbatches; the second step has other samples.
template <class Policy>
trained train_mixtures(const three& mesh, std::int64_t microbatches, const router_losses& losses,
                       recompute policy = recompute::none, std::int64_t steps = 1) {
  trained out;
  dim_sizes sizes = mixture_sizes();
  constexpr std::int64_t samples = 16;
  sizes.set(dim_of<batch>, samples);
  const std::vector<double> inputs = random_full(layout_v<typename Policy::input>, sizes, 1),
                            seeds = random_full(layout_v<typename Policy::input>, sizes, 2);
  sizes.set(dim_of<batch>, samples / microbatches);
  on_mesh(mesh, sizes, 1, [&](const context<cpu>& ctx) {
    using mixture = moe<double, Policy>;
    std::vector<mixture> layers;
    for (const char* name : {"first", "second"})
      layers.emplace_back(ctx, name, moe_options{.losses = losses, .limit = {1.0}});
    stack<mixture> both(std::move(layers));
    fill_parameters(ctx, both, {});
    both.visit([&](auto& p) {
      if (p.changes_at_end_of_step()) p.initialize(ctx);
    });
    gather_parameters(ctx, both);
    double sum = 0, other = 0;
    auxiliary_sum auxiliary{&sum}, unfinished{&other};
    const std::int64_t last = steps * microbatches;
    for (std::int64_t i = -1; i <= last; ++i) {  // an aborted step, steps, and an evaluation
      if (i > 0 && i < last && i % microbatches == 0) end_step(ctx, both);
      const auto n = static_cast<std::ptrdiff_t>(inputs.size()) / microbatches;
      const auto part = [&](const std::vector<double>& all) {
        const std::ptrdiff_t at = std::clamp<std::int64_t>(i, 0, last - 1) % microbatches * n;
        return place_full<typename Policy::input>(ctx, std::vector(all.begin() + at, all.begin() + at + n));
      };
      microbatch<cpu> mb(ctx);
      mb.index = std::max<std::int64_t>(i, 0) % microbatches, mb.count = microbatches, mb.policy = policy;
      mb.auxiliary = i < 0 ? &unfinished : i < last ? &auxiliary : nullptr;
      typename stack<mixture>::saved kept;
      const bool first = i < microbatches;
      const auto x = part(first ? inputs : seeds), dy = part(first ? seeds : inputs);
      both.forward(mb, x, i < 0 || i == last ? nullptr : &kept);
      if (i < 0 || i == last) continue;
      both.backward(mb, x, kept, dy);
    }
    const trained mine{collect_auxiliary(ctx, auxiliary), both[1].statistics(ctx), reduce_gradients(ctx, both)};
    if (ctx.ranks.rank() == 0) out = mine;
  });
  return out;
}

void check_equal(const trained& got, const trained& expected, const std::string& where) {
  CHECK(got.router.load == expected.router.load);
  CHECK(got.router.dropped == expected.router.dropped);
  CHECK(got.router.entropy == doctest::Approx(expected.router.entropy).epsilon(1e-12));
  CHECK(got.auxiliary == doctest::Approx(expected.auxiliary).epsilon(1e-12));
  REQUIRE(got.gradients.size() == expected.gradients.size());
  for (std::size_t i = 0; i < got.gradients.size(); ++i)
    check_near(got.gradients[i].second, expected.gradients[i].second, 1e-11, where + got.gradients[i].first);
}

/// Modes of recompute alternate, so every mesh and every number of microbatches meets both.
void check_microbatches(std::initializer_list<three> meshes, const router_losses& losses, std::int64_t steps,
                        const trained& expected) {
  int turn = 0;
  for (const std::int64_t microbatches : {1, 2, 4})
    for (const three& mesh : meshes)
      check_equal(train_mixtures<exchanged>(mesh, microbatches, losses,
                                            turn++ % 2 == 0 ? recompute::none : recompute::full, steps),
                  expected, cat({microbatches, " microbatches, ", describe(mesh.shape()), ": "}));
}

}  // namespace

TEST_CASE("sums over tokens and sequences are equal for any number of microbatches") {
  const router_losses additive{.balance = {3}, .z_loss = 0.7};
  const trained one = train_mixtures<exchanged>(three{1, 1, 1}, 1, additive);
  const auto sum = [](const std::vector<std::int64_t>& of) { return std::accumulate(of.begin(), of.end(), 0); };
  CHECK(sum(one.router.load) == 16 * 9 * 2);
  CHECK((sum(one.router.dropped) > 16 && one.router.entropy > 0.5 && one.router.entropy < std::log(8)));
  CHECK(one.auxiliary > 6);  // two layers with a balance loss of at least about 3 each
  check_microbatches({three{1, 1, 1}, three{1, 1, 2}, three{2, 2, 2}}, additive, 1, one);
}
TEST_CASE("a balance over steps, by the counts of the step before, is equal for any number of microbatches") {
  const router_losses over_steps{.balance = {3, balance_over::step}};
  const trained first = train_mixtures<exchanged>(three{1, 1, 1}, 1, over_steps),
                one = train_mixtures<exchanged>(three{1, 1, 1}, 1, over_steps, recompute::none, 2);
  CHECK(first.auxiliary == doctest::Approx(6).epsilon(1e-12));  // of two layers, each of which counts as balanced
  CHECK(std::abs(one.auxiliary - 12) > 1e-3);
  check_microbatches({three{1, 1, 1}, three{1, 4, 1}, three{2, 2, 2}}, over_steps, 2, one);
}
TEST_CASE("a balance over microbatches depends on their number, and not on the mesh") {
  const router_losses together{.balance = {3, balance_over::microbatch}};
  double before = 0;
  for (const std::int64_t microbatches : {1, 2, 4}) {
    const trained one = train_mixtures<exchanged>(three{1, 1, 1}, microbatches, together);
    CHECK(std::abs(one.auxiliary - before) > 1e-3);
    before = one.auxiliary;
    for (const three& mesh : {three{1, 2, 1}, three{2, 2, 2}})
      check_equal(train_mixtures<exchanged>(mesh, microbatches, together), one, describe(mesh.shape()) + ": ");
  }
}

namespace {

struct plain_losses {
  double value = 0, entropy = 0;
  std::vector<double> dw, dx;
};

// The definitions, for x [tokens, width], weights w [experts, width] and sets of `set` tokens, with 2 experts for each
// token.
// `last` [experts] is f_e, if it is not of these tokens.
plain_losses losses_by_definition(const std::vector<double>& x, const std::vector<double>& w, std::size_t width,
                                  std::size_t set, kernels::expert_scores kind, double balance, double z_loss,
                                  const std::vector<double>& last = {}) {
  const std::size_t all = w.size() / width, tokens = x.size() / width, k = 2;
  const auto n = [](std::size_t i) { return static_cast<double>(i); };
  const bool softmax = kind == kernels::expert_scores::softmax;
  std::vector<double> z(tokens * all), p(tokens * all), f(tokens / set * all), mean(f.size()), lse(tokens);
  plain_losses out{0, 0, std::vector<double>(w.size()), std::vector<double>(x.size())};
  for (std::size_t t = 0; t < tokens; ++t) {
    double* const scores = z.data() + t * all;
    for (std::size_t e = 0; e < all; ++e)
      for (std::size_t h = 0; h < width; ++h) scores[e] += x[t * width + h] * w[e * width + h];
    const auto positive = [&](std::size_t e) { return softmax ? std::exp(scores[e]) : 1 / (1 + std::exp(-scores[e])); };
    double sum = 0, exponentials = 0;
    for (std::size_t e = 0; e < all; ++e) sum += positive(e), exponentials += std::exp(scores[e]);
    lse[t] = std::log(exponentials);
    out.value += z_loss * lse[t] * lse[t] / n(tokens);
    for (std::size_t e = 0; e < all; ++e) {
      p[t * all + e] = positive(e) / sum;
      out.entropy -= p[t * all + e] * std::log(p[t * all + e]) / n(tokens);
      mean[t / set * all + e] += p[t * all + e] / n(set);
      const auto better = std::count_if(scores, scores + all, [&](double other) { return other > scores[e]; });
      if (better < static_cast<std::ptrdiff_t>(k)) f[t / set * all + e] += 1 / n(k * set);
    }
  }
  if (!last.empty()) f = last;
  for (std::size_t i = 0; i < f.size(); ++i) out.value += balance * n(all) * f[i] * mean[i] * n(set) / n(tokens);
  for (std::size_t t = 0; t < tokens; ++t)
    for (std::size_t e = 0; e < all; ++e) {
      double dz = z_loss * 2 * lse[t] * std::exp(z[t * all + e] - lse[t]) / n(tokens);
      for (std::size_t o = 0; o < all; ++o) {
        const double slope = softmax ? 1 : 1 / (1 + std::exp(z[t * all + e])),
                     dp = p[t * all + e] * slope * ((o == e ? 1 : 0) - p[t * all + o]);  // of p_o by z_e
        dz += balance * n(all) * f[t / set * all + o] / n(tokens) * dp;
      }
      for (std::size_t h = 0; h < width; ++h) {
        out.dw[e * width + h] += dz * x[t * width + h];
        out.dx[t * width + h] += dz * w[e * width + h];
      }
    }
  return out;
}

}  // namespace

TEST_CASE("auxiliary losses and their gradients equal the definitions") {
  struct alone {
    using input = spec<batch, seq, hidden, invariant<dp, ep, tp>>;
    using weight = spec<experts, ffn, hidden>;
    using output = input;
  };
  for (const kernels::expert_scores kind : {kernels::expert_scores::softmax, kernels::expert_scores::sigmoid})
    for (const balance_over over : {balance_over::sequence, balance_over::microbatch, balance_over::step})
      on_mesh(three{1, 1, 1}, even_sizes(), 1, [&](const context<cpu>& ctx) {
        moe<double, alone> layer(ctx, "moe", {{.scores = kind}, {}, {{0.6, over}, 0.3}});
        fill_parameters(ctx, layer, {});
        std::vector<double> w;
        layer.visit([&](const auto& p) {
          if (p.name() == "moe.gate.weight") w.assign(p.value(), p.value() + p.size());
        });
        const std::vector<double> input = random_full(layout_v<alone::input>, ctx.sizes, 1);
        const auto x = place_full<alone::input>(ctx, input);
        tensor<double, alone::input> dy(ctx);
        kernels::fill(ctx.device, dy.data(), dy.size(), 0.0);  // so all gradients come from auxiliary losses
        double value = 0;
        auxiliary_sum sum{&value};
        microbatch<cpu> mb(ctx);
        mb.auxiliary = &sum;
        std::vector<double> last;
        if (over == balance_over::step) {
          layer.forward(mb, place_full<alone::input>(ctx, random_full(layout_v<alone::input>, ctx.sizes, 2)));
          end_step(ctx, layer);
          for (const std::int64_t count : layer.load(ctx)) last.push_back(static_cast<double>(count) / (2 * 32));
        }
        value = 0, mb.count = 2;
        moe<double, alone>::saved kept;
        layer.forward(mb, x, &kept);
        const auto dx = layer.backward(mb, x, kept, dy);
        const std::size_t set = over == balance_over::sequence ? 8 : 32;
        const plain_losses plain = losses_by_definition(input, w, 8, set, kind, 0.6 / 2, 0.3 / 2, last);
        CHECK(value == doctest::Approx(plain.value).epsilon(1e-12));
        CHECK(layer.statistics(ctx).entropy == doctest::Approx(plain.entropy).epsilon(1e-8));
        check_near(std::vector(dx.data(), dx.data() + dx.size()), plain.dx, 1e-12, "dx");
        for (const auto& [name, gradient] : reduce_gradients(ctx, layer))
          if (name == "moe.gate.weight") check_near(gradient, plain.dw, 1e-12, name);
      });
}

// All scores are equal, so every token chooses the first experts, and the others have no rows.
TEST_CASE("a repeated forward pass keeps the first one's choice") {
  on_mesh(three{1, 1, 1}, even_sizes(), 1, [](const context<cpu>& ctx) {
    using layer = moe<double, exchanged>;
    layer m(ctx, "moe", {.init = {0, 1}});
    initialize(ctx, m);
    gather_parameters(ctx, m);
    const auto x = place_full<layer::input>(ctx, random_full(layout_v<layer::input>, ctx.sizes, 3));
    double value = 0;
    auxiliary_sum losses{&value};
    microbatch<cpu> mb(ctx);
    mb.auxiliary = &losses;
    const auto choice_of = [&](const microbatch<cpu>& at) {
      layer::saved kept;
      static_cast<void>(m.forward(at, x, &kept));
      const auto* const chosen = kept.choice.data<std::int32_t>();
      return std::vector<std::int32_t>(chosen, chosen + kept.choice.bytes() / sizeof(std::int32_t));
    };
    const auto first = choice_of(mb);
    static_cast<void>(m.forward(mb.keeping(recompute::full), x));
    m.visit([&](auto& p) {  // as if the router's product had other bits
      if (p.name() == "moe.gate.weight") p.fill_values(ctx, [&](double* v) { std::reverse(v, v + p.size()); });
    });
    gather_parameters(ctx, m);
    CHECK(choice_of(mb.repeated()) == first);
    CHECK(choice_of(mb.repeated()) != first);  // the first choice is then forgotten
    CHECK(choice_of(mb) != first);
  });
}

TEST_CASE("experts without rows") {
  const auto make = [](const auto& ctx) { return moe<double, exchanged, device_of<decltype(ctx)>>(ctx, "mixture"); };
  const dim_sizes sizes = even_sizes();
  const auto first_experts = [&](const three& mesh) {
    std::vector<double> norms(8);
    on_mesh(mesh, sizes, 1, [&](const context<cpu>& ctx) {
      auto layer = make(ctx);
      layer.visit([&](auto& p) {
        if (p.name() == "mixture.gate.weight")
          kernels::fill(ctx.device, p.value(), p.size(), 0.0);
        else
          p.initialize(ctx);
        p.gather(ctx), p.zero_gradient(ctx);
      });
      typename decltype(layer)::saved kept;
      const auto x = place_full<exchanged::input>(ctx, random_full(layout_v<exchanged::input>, sizes, 1));
      const auto dy = place_full<exchanged::input>(ctx, random_full(layout_v<exchanged::input>, sizes, 2));
      layer.forward(ctx, x, &kept);
      layer.backward(ctx, x, kept, dy);
      adamw<double> optimizer({.weight_decay = 0.5});
      optimizer.begin_step(ctx, /*learning_rate=*/0.1);
      layer.visit([&](auto& p) {
        auto gradient = p.reduce(ctx);
        if (p.name() != "mixture.experts.up_proj.weight") return;
        const auto all = collect_full(ctx, dual(p.stored()), gradient.data());
        if (ctx.ranks.rank() == 0)
          for (std::size_t i = 0; i < all.size(); ++i) norms[i / (all.size() / 8)] += all[i] * all[i];
        const std::vector<double> before(p.value(), p.value() + p.size());
        optimizer.update(ctx, std::move(gradient));
        const box& part = p.part();
        for (std::size_t i = 0; i < before.size(); ++i) {  // an expert without rows decays
          const std::int64_t expert = part.offset[0] + static_cast<std::int64_t>(i) / (p.size() / part.local[0]);
          CHECK((p.value()[i] == doctest::Approx(0.95 * before[i]).epsilon(1e-12)) == (expert >= 2));
        }
      });
    });
    return norms;
  };
  const std::vector<double> one = first_experts(three{1, 1, 1});
  for (std::size_t e = 0; e < 8; ++e) CHECK((one[e] > 0) == (e < 2));
  for (const three& mesh : {three{1, 4, 1}, three{2, 2, 2}}) check_near(first_experts(mesh), one, 1e-12, "norms");
}

// Experts of a rank get rows of all its peers; each rank of tp has the rows of its sequences.
TEST_CASE("exchanges send exactly the rows that were chosen and not dropped, within their bound") {
  constexpr std::int64_t k = 2, all_experts = 8, row_bytes = 8 * sizeof(double);
  for (const double limit : {0.0, 1.0})
    for (const three& mesh : {three{1, 4, 1}, three{2, 2, 2}}) {
      const mesh_shape shape = mesh.shape();
      const axis_list over_tp(axis_of<tp>), over_ep(axis_of<ep>), of_peers(axis_of<ep>, axis_of<tp>);
      const std::int64_t ranks = shape.size(), peers = shape.size(over_ep), copies = shape.size(over_tp),
                         own = all_experts / peers, rows_of_rank = 32 * k / ranks * copies;
      std::vector<std::vector<std::int32_t>> choices(static_cast<std::size_t>(ranks));
      std::vector<std::int64_t> sent(choices.size());
      std::vector<std::int64_t> dropped;
      on_mesh(mesh, even_sizes(), 1, [&](const context<cpu>& ctx) {
        moe<double, exchanged> layer(ctx, "moe", {.router = {.chosen = k}, .limit = {limit}});
        fill_parameters(ctx, layer, {});
        double value = 0;
        auxiliary_sum counts{&value};
        microbatch<cpu> mb(ctx);
        mb.auxiliary = &counts;
        moe<double, exchanged>::saved kept;
        const auto x = place_full<exchanged::input>(ctx, random_full(layout_v<exchanged::input>, ctx.sizes, 1));
        ctx.ranks.ledger().clear();
        const auto y = layer.forward(mb, x, &kept);
        const auto* const chosen = kept.choice.data<std::int32_t>();
        const auto here = static_cast<std::size_t>(ctx.ranks.rank());
        choices[here].assign(chosen, chosen + kept.choice.bytes() / sizeof(std::int32_t));
        layer.backward(mb, x, kept, y);
        const auto bytes = static_cast<std::int64_t>(ctx.ranks.ledger().total("ep", collective::all_to_all).payload);
        sent[here] = bytes - all_experts * static_cast<std::int64_t>(sizeof(std::int32_t));  // the counts
        const router_statistics found = layer.statistics(ctx);
        if (here == 0) dropped = found.dropped;
      });
      const std::int64_t lost = std::accumulate(dropped.begin(), dropped.end(), std::int64_t{0});
      CHECK((lost > 0) == (limit > 0));
      // Rows go to experts and back, and so do their gradients.
      CHECK(std::accumulate(sent.begin(), sent.end(), std::int64_t{0}) == 4 * copies * (32 * k - lost) * row_bytes);
      for (std::int64_t r = 0; r < ranks; ++r) {
        std::int64_t arriving = 0;
        for (std::int64_t other = 0; other < ranks; ++other)
          if (shape.group_of(other, of_peers) == shape.group_of(r, of_peers))
            for (const std::int32_t e : choices[static_cast<std::size_t>(other)])
              arriving += e / own == shape.index_in(r, over_ep);
        const std::int64_t bytes = sent[static_cast<std::size_t>(r)],
                           bound = peers * (rows_of_rank / k) * std::min(k, own);
        if (limit == 0) CHECK(bytes == 2 * (rows_of_rank + arriving) * row_bytes);
        CHECK(bytes <= 2 * (rows_of_rank + bound) * row_bytes);
      }
    }
}

TEST_CASE("a limit is a factor of an expert's even share of a sequence") {
  on_mesh(three{1, 1, 1}, even_sizes(), 1,
          [](const context<cpu>& ctx) {  // sequences of 8, 2 of 8 experts: a share of 2
            for (const auto& [factor, kept] : {std::pair{0.0, 8}, {0.5, 1}, {1.0, 2}, {1.1, 3}, {4.0, 8}}) {
              moe<float, exchanged> layer(ctx, "moe", {{.chosen = 2}, {0, 0.5}, {}, {factor}});
              layer.visit([&](auto& p) {
                p.initialize(ctx);
                if (p.name() == "moe.gate.weight")
                  p.fill_values(ctx, [&](float* v) { std::fill(v, v + p.size(), 0.0f); });
                p.gather(ctx);
              });
              tensor<float, exchanged::input> x(ctx);
              for (std::int64_t i = 0; i < x.size(); ++i) x.data()[i] = static_cast<float>(i % 7) - 2.5f;
              const auto y = layer.forward(ctx, x);  // all tokens choose the first two experts
              const std::int64_t features = ctx.sizes.of(dim_of<hidden>);
              for (std::int64_t token = 0; token < x.size() / features; ++token)
                CHECK((y.data()[token * features] != 0) == (token % 8 < kept));
            }
          });
}

TEST_CASE("mixtures without an order for deterministic sums are refused") {
  const auto refused = [](std::int64_t ep, auto make, const auto& text) {
    on_mesh(
        three{1, ep, 1}, even_sizes(), 1, [&](const context<cpu>& ctx) { CHECK_THROWS_WITH(make(ctx), text); },
        leaves_of_four);
  };
  refused(
      2, [](auto& ctx) { moe<float, masked>(ctx, "moe"); },
      "moe: deterministic sums have no order for the sum over ranks of ep, which shards experts and no tokens; legal "
      "are axes of experts that shard tokens too");
  refused(
      1, [](auto& ctx) { moe<float, masked>(ctx, "moe").resize(ctx); },
      doctest::Contains("resize with deterministic sums"));
  refused(
      1, [](auto& ctx) { moe<float, exchanged>(ctx, "moe", {.lora = {.up = {.rank = 1}}}); },
      "moe: experts have no adapters under deterministic sums; legal is a lora of rank 0");
  refused(
      1, [](auto& ctx) { moe<float, exchanged>(ctx, "moe", {.padded = true}); },
      "moe: its rows are not padded under deterministic sums; legal is moe_options::padded = false");
  refused(
      1,
      [](auto& ctx) {
        moe<float, exchanged>(ctx, "moe", {.losses = {.balance = {1, balance_over::microbatch}}});
      },
      "moe: balance_over::microbatch under deterministic sums, and a microbatch has other samples on each mesh; legal "
      "are balance_over::sequence and step");
}

TEST_CASE("ranks without tokens are refused") {
  const auto make = [](const context<cpu>& ctx) { moe<float, exchanged>(ctx, "moe"); };
  CHECK(error_on_mesh(three{2, 3, 1}, mixture_sizes(), 1, make)
            .find("input of moe.gate.weight: a dim has fewer elements than there are ranks that shard it: batch is 5, "
                  "sharded over dp=2 x ep=3 = 6 ranks; it must be at least 6") != std::string::npos);
}

TEST_CASE("unsupported options of a mixture are refused") {
  on_mesh(three{1, 1, 1}, even_sizes(), 1, [](const context<cpu>& ctx) {
    using layer = moe<float, exchanged>;
    for (const std::int64_t k : {0, 9})
      CHECK_THROWS_WITH(layer(ctx, "moe", {{.chosen = k}}),
                        cat({"moe: each token chooses ", k, " of 8 experts; legal are 1 to 8"}).c_str());
    CHECK_THROWS_WITH(layer(ctx, "moe", {.lora = {.up = {.rank = -1}}}),
                      "moe.experts.up_proj: the rank of an adapter is -1; at least 1, or 0 for none");
    for (const std::int64_t groups : {0, 3})
      CHECK_THROWS_WITH(
          layer(ctx, "moe", {{.groups = groups}}),
          cat({"moe: its router has ", groups, " groups; legal are those that divide its 8 experts"}).c_str());
    for (const std::int64_t groups : {0, 5})
      CHECK_THROWS_WITH(layer(ctx, "moe", {{.groups = 4, .chosen_groups = groups}}),
                        cat({"moe: each token chooses ", groups, " of 4 groups; legal are 1 to 4"}).c_str());
    CHECK_THROWS_WITH(layer(ctx, "moe", {{.chosen = 5, .groups = 4, .chosen_groups = 2}}),
                      "moe: each token chooses 5 experts of 2 groups of 2; legal are 1 to 4");
    CHECK_THROWS_WITH(
        layer(ctx, "moe", {{.groups = 8, .chosen_groups = 2, .group_scores = kernels::group_scores::two_largest}}),
        "moe: group_scores::two_largest is for groups of 2 experts or more, and each has 1");
    CHECK_THROWS_WITH(layer(ctx, "moe", {.bias_rate = -1}), "moe: bias_rate = -1; legal is 0 (the bias stays) or more");
    CHECK_THROWS_WITH(layer(ctx, "moe", {.losses = {.z_loss = -1}}), "moe: z_loss = -1; legal is 0 (none) or more");
    CHECK_THROWS_WITH(layer(ctx, "moe", {.losses = {.balance = {-0.5}}}),
                      "moe: the weight of the balance loss is -0.5; legal is 0 (none) or more");
    struct flat_tokens {
      using input = spec<shard<batch, dp, ep, tp>, hidden>;
      using weight = spec<shard<experts, ep>, ffn, hidden>;
      using output = input;
    };
    CHECK_THROWS_WITH((moe<float, flat_tokens>(ctx, "moe", {.losses = {.balance = {1}}})),
                      "moe: balance_over::sequence, and the input has one dim of tokens, so that no sequence is known; "
                      "legal are balance_over::microbatch and step");
    CHECK_THROWS_WITH(layer(ctx, "moe", {.limit = {-1}}),
                      "moe: the limit of experts is -1 times their share; legal is 0 (none) or more");
    CHECK_THROWS_WITH((moe<float, flat_tokens>(ctx, "moe", {.limit = {1}})),
                      "moe: a limit of experts is one of each sequence; legal is an input of samples, positions and "
                      "features");
    CHECK_THROWS_WITH((moe<float, long_sequences>(ctx, "moe", {.limit = {1}})),
                      "moe: its tokens lie in zigzag order (zseq), and expert_limit::order does not say which");
    CHECK_THROWS_WITH(layer(ctx, "moe", {.limit = {1, sequence_order::original(6)}}),
                      "moe: expert_limit::order is of 6 positions, and a sequence has 8");
    layer made(ctx, "moe");
    made.visit([&](auto& p) { p.initialize(ctx), p.gather(ctx), p.zero_gradient(ctx); });
    tensor<float, exchanged::input> x(ctx);
    kernels::fill(ctx.device, x.data(), x.size(), 0.5f);
    layer::saved kept;
    CHECK_THROWS_WITH(made.backward(ctx, x, kept, made.forward(ctx, x)),
                      "moe: backward without what forward keeps: give forward a `saved`, and backward the same one");
  });
}
