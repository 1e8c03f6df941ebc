// program: training_step
// The training step: initial weights, learning on a text, seeds, skipped steps.
#include <limits>
#include <span>
#include <utility>

#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

TEST_CASE("initial weights depend on the seed and the name only") {
  const auto start = [](std::uint64_t seed, std::int64_t dp_ranks, std::int64_t tp_ranks) {
    scenario s{small_config(8, 4)};
    s.batch = 4, s.seq = 8;
    std::vector<named_values> values;
    on_llama_mesh(dp_ranks, tp_ranks, s, seed, [&](const context<cpu>& ctx) {
      llama<float, megatron_sp> model(ctx, s.config);
      model.visit([&](auto& p) { p.initialize(ctx); });
      auto mine = gather_values(ctx, model);
      if (ctx.ranks.rank() == ctx.ranks.size() - 1) values = std::move(mine);
    });
    return values;
  };
  const auto one = start(1, 1, 1), other = start(2, 1, 1), mesh = start(1, 2, 4);
  REQUIRE(one.size() == mesh.size());
  for (std::size_t i = 0; i < one.size(); ++i) {
    INFO(one[i].name);
    CHECK(one[i].values == mesh[i].values);
    const bool norm = one[i].name.find("norm") != std::string::npos;
    CHECK((one[i].values == other[i].values) == norm);
    double squares = 0;
    for (double v : one[i].values) squares += v * v;
    const double deviation = std::sqrt(squares / static_cast<double>(one[i].values.size()));
    CHECK(deviation == doctest::Approx(norm ? 1.0 : 0.1).epsilon(0.1));
    for (std::size_t j = 0; j < i; ++j)
      if (!norm && one[i].values.size() == one[j].values.size()) CHECK(one[i].values != one[j].values);
  }
}

TEST_CASE("the gradient of the loss matches differences of the loss, through the whole step") {
  const scenario base = [] {
    scenario s{small_config(4, 2)};
    s.config.hidden = 16, s.config.ffn = 32, s.config.layers = 1;
    s.batch = 2, s.seq = 8, s.steps = 1;
    s.options.loss.label_smoothing = 0.1;
    s.options.loss.z_loss = 1e-2;
    return s;
  }();
  const auto loss_with = [&](const std::string& name, std::size_t index, double by, named_values* gradient) {
    double loss = 0;
    on_llama_mesh(1, 1, base, 4, [&](const context<cpu>& ctx) {
      llama<double, megatron_sp> model(ctx, base.config, base.options);
      model.visit([&](auto& p) {
        p.initialize(ctx);
        if (p.name() == name) p.value()[index] += by;
      });
      adamw<double> optimizer;
      loss =
          train_step(ctx, model, optimizer, 1, 0.0, 0.0, 0, [&](std::int64_t, host_tokens& ids, host_tokens& labels) {
            fill_tokens(base, 0, ids, labels);
          }).loss;
      if (gradient)
        for (named_values& g : gather_gradients(ctx, model))
          if (g.name == name) *gradient = std::move(g);
    });
    return loss;
  };
  for (const char* name :
       {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight", "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"}) {
    INFO(name);
    named_values gradient;
    loss_with(name, 0, 0, &gradient);
    REQUIRE(!gradient.values.empty());
    for (std::size_t i = 0; i < gradient.values.size(); i += 1 + gradient.values.size() / 5) {
      const double quotient = (loss_with(name, i, 1e-5, nullptr) - loss_with(name, i, -1e-5, nullptr)) / 2e-5;
      CHECK(std::abs(quotient - gradient.values[i]) < 1e-8);
    }
  }
}

TEST_CASE("a model learns: the loss falls well below that of a guess") {
  scenario s{small_config(8, 4)};
  s.config.vocab = 16;
  s.steps = 60;
  s.learning_rate = 1e-2;
  const auto all = train_mesh<float, megatron_sp>(s, 2, 2);
  CHECK(all[0].steps.front().loss > 2.5);
  CHECK(all[0].steps.back().loss < 1.5);
  CHECK(all[0].steps.back().tokens == all[3].steps.back().tokens);
}

TEST_CASE("a step whose gradients are not finite is skipped by all ranks alike, and has no effect") {
  scenario s{small_config(4, 2)};
  s.config.hidden = 16, s.config.ffn = 32, s.config.layers = 1;
  s.batch = s.seq = 4;
  struct seen {
    std::vector<step_result> steps;
    std::vector<named_values> weights;
    std::int64_t counted = 0;
  };
  const auto run = [&](const optimizer_options& kind, bool poisoned) {
    std::vector<seen> all(4);
    on_llama_mesh(2, 2, s, 4, [&](const context<cpu>& ctx) {
      llama<double, megatron_sp> model(ctx, s.config, s.options);
      model.visit([&](auto& p) { p.initialize(ctx); });
      chosen_optimizer<double> optimizer(kind);
      training_step step(ctx, model, optimizer, 1, 1.0);
      seen& mine = all[static_cast<std::size_t>(ctx.ranks.rank())];
      const auto one_step = [&](std::int64_t number) {
        run_step(ctx, step, optimizer, s, number, 1e-2);
        return step.result(ctx);
      };
      mine.steps.push_back(one_step(0));
      if (poisoned) {
        auto& gate = model.block_at(0).template get<1>().inner();
        double* weight = nullptr;
        gate.visit([&](auto& p) {
          if (p.name().ends_with("gate_proj.weight")) weight = p.value();
        });
        const double before = weight[3];
        if (ctx.ranks.rank() == 1) weight[3] = std::numeric_limits<double>::infinity();  // on one tensor-parallel rank
        mine.steps.push_back(one_step(1));
        for (int again = 0; again < 2; ++again) CHECK(step.result(ctx).skipped);  // the step is undone only once
        weight[3] = before;
        CHECK(optimizer.step() == 1);
      }
      mine.steps.push_back(one_step(1));
      mine.weights = gather_values(ctx, model);
      mine.counted = optimizer.step();
    });
    return all;
  };
  for (const optimizer_options& kind : {optimizer_options(adamw_options{}), optimizer_options(muon_options{})}) {
    const std::vector<seen> clean = run(kind, false), poisoned = run(kind, true);
    for (std::size_t r = 0; r < 4; ++r) {
      CHECK(!poisoned[r].steps[0].skipped);
      CHECK(poisoned[r].steps[1].skipped);
      CHECK(!std::isfinite(poisoned[r].steps[1].gradient_norm));
      CHECK(!poisoned[r].steps[2].skipped);
      CHECK(poisoned[r].steps[2].loss == clean[r].steps[1].loss);
      CHECK(poisoned[r].counted == 2);
      for (std::size_t i = 0; i < clean[r].weights.size(); ++i)
        CHECK(poisoned[r].weights[i].values == clean[r].weights[i].values);
    }
  }
}

TEST_CASE("a step that an exception ended does not block the next one") {
  struct stumbling : adamw<double> {
    bool stumbles = false;
    void update(const context<cpu>& ctx, std::span<reduced_gradient<double, cpu>> gradients) {
      if (std::exchange(stumbles, false)) fail("stumbled");
      adamw<double>::update(ctx, gradients);
    }
  };
  scenario s{small_config(4, 2)};
  s.config.layers = 2, s.batch = 2, s.seq = 8;
  on_llama_mesh(1, 1, s, 4, [&](const context<cpu>& ctx) {
    llama<double, megatron_sp> model(ctx, s.config, s.options);
    model.visit([&](auto& p) { p.initialize(ctx); });
    stumbling optimizer;
    training_step step(ctx, model, optimizer, 1, 0.0);
    const auto run = [&] {
      step.load(ctx, 0, [&](std::int64_t, auto& ids, auto& labels) { fill_tokens(s, 0, ids, labels); });
      optimizer.begin_step(ctx, 1e-3);
      step.run(ctx);
    };
    CHECK_NOTHROW(run());
    optimizer.stumbles = true;
    CHECK_THROWS_WITH_AS(run(), doctest::Contains("stumbled"), error);
    CHECK_NOTHROW(run());
  });
}
