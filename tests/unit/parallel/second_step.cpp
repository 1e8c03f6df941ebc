// program: training_step
// A second training step object of the same model continues where the first one ended: at every level, in every
// precision, also while gathers of the first are in flight. Later uses of the first one are errors.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plait/parallel/parameter_hashes.hpp"
#include "support/llama_parity.hpp"
#include "support/temp_folder.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

scenario of_four_steps() {
  scenario s{small_config(8, 4)};
  s.seq = 8, s.batch = 4, s.steps = 4;
  return s;
}

template <class Precision>
using model_of = llama<Precision, megatron_sp, cpu>;
template <class Precision>
using step_of_model = training_step<model_of<Precision>>;

/// The program's actions between the steps of its training.
enum class between {
  nothing,
  another_step,  ///< makes a new training step object for each step
  a_look,        ///< gathers the parameters explicitly before the first step
  /// Makes another training step object after two steps, and visits the parameters through the first one.
  an_old_look
};

struct outcome {
  std::vector<double> losses;
  std::uint64_t hash = 0;
  friend bool operator==(const outcome&, const outcome&) = default;
};

template <class Precision>
outcome train(zero_level level, between how) {
  const scenario s = of_four_steps();
  outcome out;
  on_llama_mesh(2, 1, s, 1, [&](const context<cpu>& ctx) {
    model_of<Precision> model(ctx, s.config);
    model.visit([&](auto& p) { p.initialize(ctx); });
    if (how == between::a_look) gather_parameters(ctx, model);
    adamw<Precision> optimizer;
    pipeline_options options{.parallel = {.level = level}};
    std::vector<std::unique_ptr<step_of_model<Precision>>> steps;
    for (std::int64_t i = 0; i < s.steps; ++i) {
      const bool again = how == between::another_step || (how == between::an_old_look && i == 2);
      if (i == 0 || again)
        steps.push_back(std::make_unique<step_of_model<Precision>>(ctx, model, optimizer, 1, 1.0, options));
      if (how == between::an_old_look && i == 2) {
        std::size_t parameters = 0;
        steps.front()->model().visit([&](auto&) { ++parameters; });
        if (parameters == 0) fail("nothing is visited");
      }
      auto& step = *steps.back();
      run_step(ctx, step, optimizer, s, i, 1e-2);
      const double loss = step.result(ctx).loss;
      if (ctx.ranks.rank() == 0) out.losses.push_back(loss);
    }
    const std::uint64_t hash = weights_hash(ctx, steps.back()->model());
    if (ctx.ranks.rank() == 0) out.hash = hash;
  });
  return out;
}

template <class Precision>
void check_precision() {
  for (const zero_level level : all_levels) {
    CAPTURE(static_cast<int>(level));
    const outcome through = train<Precision>(level, between::nothing);
    CHECK(through.losses.back() < 0.9 * through.losses.front());
    CHECK(train<Precision>(level, between::another_step) == through);
    CHECK(train<Precision>(level, between::a_look) == through);
    CHECK(train<Precision>(level, between::an_old_look) == through);
  }
}

}  // namespace

TEST_CASE("in float, another training step continues where the first one ended") { check_precision<float>(); }
TEST_CASE("in bf16 with rounded values, another training step continues where the first one ended") {
  check_precision<bf16>();
}
TEST_CASE("in bf16 with gradients in bf16, another training step continues where the first one ended") {
  check_precision<bf16_gradients>();
}

TEST_CASE("the first training step is refused, and changes nothing") {
  const scenario s = of_four_steps();
  for (const zero_level level : all_levels) {
    CAPTURE(static_cast<int>(level));
    on_llama_mesh(2, 1, s, 1, [&](const context<cpu>& ctx) {
      model_of<bf16> model(ctx, s.config);
      model.visit([&](auto& p) { p.initialize(ctx); });
      adamw<bf16> optimizer;
      pipeline_options options{.parallel = {.level = level}};
      step_of_model<bf16> one(ctx, model, optimizer, 1, 1.0, options), two(ctx, model, optimizer, 1, 1.0, options);
      const auto run = [&](step_of_model<bf16>& step) {
        run_step(ctx, step, optimizer, s, 0, 1e-2);
        return step.result(ctx).loss;
      };
      const double first = run(two);
      const auto is_refused = [&](auto&& use) {
        return text_thrown_by(use).starts_with("training step: another one has been made for this model since");
      };
      if (!is_refused([&] { run(one); })) fail("a step of the first one");
      const host_tokens none(typename model_of<bf16>::tokens(ctx).part(), one.model().order());
      typename model_of<bf16>::tokens ids(ctx);
      upload(ctx, none, ids);
      if (!is_refused([&] { one.model().score(ctx, ids); })) fail("a forward pass of the first one");
      if (!(run(two) < first)) fail("the second one does not go on");
    });
  }
}
