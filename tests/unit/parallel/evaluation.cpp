// program: training_step
// Forward passes between steps, without dropout, with every policy; and values that a program changes between steps.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/parallel/evaluate.hpp"
#include "support/llama_parity.hpp"
#include "support/temp_folder.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using small = llama<double, megatron_sp, cpu>;

scenario of_one_step() {
  scenario s{small_config(8, 4)};
  s.seq = 8;
  return s;
}

/// Calls f(ctx, model) on each of `ranks` data ranks, with initial weights.
template <class M = small, class F>
void on_ranks(int ranks, const scenario& s, const llama_options& how, const F& f) {
  on_llama_mesh(ranks, 1, s, 1, [&](const context<cpu>& ctx) {
    M model(ctx, s.config, how);
    model.visit([&](auto& p) { p.initialize(ctx); });
    f(ctx, model);
  });
}

/// The loss of `microbatches` equal microbatches, by a pipeline that trains with one microbatch.
double loss_of(const context<cpu>& ctx, pipeline<small>& model, const scenario& s, std::int64_t microbatches) {
  const auto fill = [&](std::int64_t, host_tokens& ids, host_tokens& labels, host_starts&) {
    fill_tokens(s, 0, ids, labels);
  };
  CHECK_FALSE(evaluate(ctx, model, microbatches, fill, [] { return true; }));
  const auto ignore = [&](std::int64_t, host_tokens& ids, host_tokens& labels, host_starts&) {
    fill_tokens(s, 0, ids, labels);
    labels.fill([](std::int64_t, std::int64_t) { return -100; });
  };
  CHECK(evaluate(ctx, model, microbatches, ignore, [] { return false; })->tokens == 0);
  return evaluate(ctx, model, microbatches, fill, [] { return false; })->mean();
}

}  // namespace

TEST_CASE("a model is evaluated and scored without dropout, and trained with it") {
  const scenario s = of_one_step();
  std::vector<double> losses[2], trained[2];
  std::vector<double> scores[2];
  for (const bool drops : {false, true}) {
    losses[drops].resize(2), trained[drops].resize(2);
    on_ranks(2, s, {.dropout = drops ? 0.5 : 0.0}, [&](auto& ctx, small& model) {
      const auto r = static_cast<std::size_t>(ctx.ranks.rank());
      adamw<double> optimizer;
      training_step step(ctx, model, optimizer, 1, 1.0);
      losses[drops][r] = loss_of(ctx, step.model(), s, 2);
      host_tokens ids(small::tokens(ctx).part(), model.order()), labels(ids);
      fill_tokens(s, 0, ids, labels);
      small::tokens on_device(ctx);
      upload(ctx, ids, on_device);
      const auto by_pipeline = step.model().score(ctx, on_device), by_model = model.score(ctx, on_device);
      for (std::int64_t i = 0; i < by_model.size(); ++i) CHECK(by_model.data()[i] == by_pipeline.data()[i]);
      if (r == 0) scores[drops].assign(by_model.data(), by_model.data() + by_model.size());
      run_step(ctx, step, optimizer, s, 0, 0.0);
      trained[drops][r] = step.result(ctx).loss;
    });
  }
  CHECK(losses[0] == losses[1]);
  CHECK(scores[0] == scores[1]);
  CHECK(std::abs(trained[0][0] - losses[0][0]) < 1e-12);
  CHECK(std::abs(trained[1][0] - losses[1][0]) > 1e-3);
}

TEST_CASE("a loss in chunks of tokens is evaluated, scored and trained like one of all tokens") {
  const scenario s = of_one_step();
  for (const std::int64_t chunks : {4, 3, 5, 8})  // 3 and 5 do not divide a rank's 8 positions
    on_ranks(2, s, {}, [&](auto& ctx, small& whole) {
      CAPTURE(chunks);
      small chunked(ctx, s.config, {.loss_chunks = chunks});
      chunked.visit([&](auto& p) { p.initialize(ctx); });
      host_tokens ids(small::tokens(ctx).part(), whole.order()), labels(ids);
      fill_tokens(s, 0, ids, labels);
      small::tokens on_device(ctx), its_labels(ctx);
      upload(ctx, ids, on_device);
      upload(ctx, labels, its_labels);
      const auto results = [&](small& model) {
        gather_parameters(ctx, model);
        zero_gradients(ctx, model);
        small::saved kept;
        std::vector<double> found{*model.forward(ctx, on_device, its_labels, &kept).data()};
        model.backward(ctx, on_device, its_labels, kept, small::mean::seed_type::weighted(ctx, 0.1));
        model.visit([&](auto& p) {
          const auto reduced = p.reduce(ctx);
          found.insert(found.end(), reduced.data(), reduced.data() + p.used_size());
        });
        const auto scores = model.score(ctx, on_device);
        found.insert(found.end(), scores.data(), scores.data() + scores.size());
        return found;
      };
      const std::vector<double> a = results(whole), b = results(chunked);
      REQUIRE(a.size() == b.size());
      double difference = 0;
      for (std::size_t i = 0; i < a.size(); ++i) difference = std::max(difference, std::abs(a[i] - b[i]));
      CHECK(difference < 1e-12 * a[0]);
      adamw<double> one_optimizer, other_optimizer;
      training_step one(ctx, whole, one_optimizer, 1, 1.0), other(ctx, chunked, other_optimizer, 1, 1.0);
      CHECK(std::abs(loss_of(ctx, one.model(), s, 2) - loss_of(ctx, other.model(), s, 2)) < 1e-12);

      for (const std::int64_t illegal : {0, 9})
        CHECK_ERROR(small(ctx, s.config, {.loss_chunks = illegal}),
                    "language model: loss_chunks = " + std::to_string(illegal) +
                        "; legal are 1 to 8, as many as each rank has positions of a sequence");
    });
}

TEST_CASE("values that change while a gather is in flight are gathered before they are used") {
  const scenario s = of_one_step();
  for (const zero_level level : all_levels) {
    CAPTURE(static_cast<int>(level));
    std::vector<double> first(2), again(2);
    on_ranks(2, s, {}, [&](auto& ctx, small& model) {
      adamw<double> optimizer;
      pipeline_options how{.parallel = {.level = level}};
      training_step step(ctx, model, optimizer, 1, 1.0, how);
      const auto loss = [&] {
        step.load(ctx, 0, [&](std::int64_t, auto& i, auto& l, host_starts&) { fill_tokens(s, 0, i, l); });
        optimizer.begin_step(ctx, 1e-2);
        step.run(ctx);
        return step.result(ctx).loss;
      };
      const auto r = static_cast<std::size_t>(ctx.ranks.rank());
      first[r] = loss();
      model.visit([&](auto& p) { p.initialize(ctx); });  // not through the step's model, which waits for the gathers
      again[r] = loss();
    });
    CHECK(first == again);
  }
}

TEST_CASE("a model with a parameter that was never set is not trained") {
  const scenario s = of_one_step();
  for (const zero_level level : {zero_level::replicated, zero_level::gradients, zero_level::parameters}) {
    CAPTURE(static_cast<int>(level));
    const auto train = [&] {
      on_llama_mesh(2, 1, s, 1, [&](const context<cpu>& ctx) {
        small model(ctx, s.config);
        model.visit([&](auto& p) {
          if (p.name() != "model.norm.weight") p.initialize(ctx);
        });
        adamw<double> optimizer;
        pipeline_options how{.parallel = {.level = level}};
        training_step step(ctx, model, optimizer, 1, 1.0, how);
        step.load(ctx, 0, [&](std::int64_t, auto& i, auto& l, host_starts&) { fill_tokens(s, 0, i, l); });
        optimizer.begin_step(ctx, 1e-2);
        step.run(ctx);
      });
    };
    CHECK_ERROR(train(), "parameter model.norm.weight: gather would have layers read values that have not been set");
  }
}

namespace {

struct without_units : small {
  using small::small;
  int units() const { return 0; }
};

}  // namespace

TEST_CASE("a stage without units, a NaN limit, a run without tokens and documents of another batch are refused") {
  const scenario s = of_one_step();
  on_ranks<without_units>(1, s, {}, [&](auto& ctx, without_units& model) {
    adamw<double> optimizer;
    CHECK_ERROR((training_step(ctx, model, optimizer, 1, 1.0)),
                "pipeline: units() of stage 0 is 0; legal is 1 or more, or no units() at all");
  });
  on_ranks(1, s, {}, [&](auto& ctx, small& model) {
    adamw<double> optimizer;
    for (const double limit : {-1.0, std::nan("")})
      CHECK_ERROR((training_step(ctx, model, optimizer, 1, limit)), "training step: the limit of the gradient norm is ",
                  "; legal is 0 (none) or more");
    training_step step(ctx, model, optimizer, 1, 1.0);
    CHECK_ERROR(step.run(ctx), "training step: run(ctx) without tokens; load(ctx, first_sample, fill) comes before it");
    CHECK_ERROR(step.result(ctx), "training step: result(ctx) before the first run(ctx)");
    CHECK_ERROR(step.load_again(), "training step: load_again() before the first run(ctx)");
    model.visit([&](auto& p) { p.initialize(ctx); });
    const auto load = [&] {
      step.load(ctx, 0, [](std::int64_t, host_tokens& ids, host_tokens& labels) {
        std::fill_n(ids.data(), ids.size(), 1);
        std::fill_n(labels.data(), labels.size(), 2);
      });
    };
    load();
    CHECK_ERROR(step.run(ctx), "adamw: begin_step(ctx, learning_rate) comes before each run(ctx) of a training step");
    load();
    for (int i = 0; i < 3; ++i) optimizer.begin_step(ctx, 1e-3);
    CHECK_ERROR(step.run(ctx), "adamw: begin_step was called 3 times before one run(ctx) of a training step; it comes ",
                "once for a step, whatever the number of microbatches");
    load();
    optimizer.begin_step(ctx, 1e-3);
    step.run(ctx);
    CHECK_ERROR(step.run(ctx),
                "training step: run(ctx) on the tokens of the step before; load(ctx, first_sample, fill) ",
                "comes before each run, and load_again() where the same tokens are meant");
    step.load_again();
    optimizer.begin_step(ctx, 1e-3);
    step.run(ctx);
    pipeline<small>::batch batch;
    for (int i = 0; i < 2; ++i) batch.emplace_back(small::tokens(ctx), small::tokens(ctx));
    small::mean mean(ctx);
    const std::int32_t* starts[] = {nullptr};
    CHECK_ERROR(step.model().evaluate(ctx, batch, mean, starts), "pipeline: 2 microbatches, and the documents of 1");
  });
}

TEST_CASE("ids and labels that a fill leaves out are refused") {
  on_ranks(1, of_one_step(), {}, [](const context<cpu>& ctx, small& model) {
    model.visit([&](auto& p) { p.initialize(ctx); });
    const auto run = [&](bool fills_ids) {
      adamw<double> optimizer;
      training_step step(ctx, model, optimizer, 1, 1.0);
      step.load(ctx, 0, [&](std::int64_t, host_tokens& ids, host_tokens& labels) {
        (fills_ids ? ids : labels).fill([](std::int64_t, std::int64_t) { return 1; });
      });
      optimizer.begin_step(ctx, 1e-3);
      step.run(ctx);
    };
    CHECK_ERROR(run(true), "cross_entropy: row 0 has target -4611686018427387904, legal are 0 to ");
    CHECK_ERROR(run(false), "embedding: token 0 has id -4611686018427387904, legal are 0 to ");
  });
}

TEST_CASE("a moved-from model is refused by the name of a layer") {
  on_ranks(1, of_one_step(), {}, [](const context<cpu>& ctx, small& model) {
    small other = std::move(model);
    adamw<double> optimizer;
    const small::tokens ids(ctx), labels(ctx);
    const auto refused = [](const char* what, auto&& call) {
      CHECK_THROWS_WITH_AS(call(), doctest::Contains(what), error);
    };
    const char* const by_name =
        "model.embed_tokens: it was moved from, and is used; use the object that it was moved to";
    refused(by_name, [&] { gather_parameters(ctx, model); });
    refused(by_name, [&] { model.score(ctx, ids); });
    refused(by_name, [&] { model.forward(ctx, ids, labels, nullptr); });
    refused("a stack of layers: it was moved from", [&] { training_step(ctx, model, optimizer, 1, 1.0); });
    gather_parameters(ctx, other);
    model = std::move(other);
    zero_gradients(ctx, model);
  });
}
