// program: data_parallel
// A norm that a step leaves under way: numbers, weights and traffic equal those of steps that are waited for in every
// bit, whoever asks asks alone, and one that is under way is saved, outlives an exception, and says what is not finite.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "plait/train/optim/adamw.hpp"
#include "support/pipeline_parity.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct layout_of_run {
  std::int64_t dp = 1, pp = 1, tp = 1, microbatches = 1;
  zero_level level = zero_level::replicated;
  bool canonical = false;

  int ranks() const { return static_cast<int>(dp * pp * tp); }
  mesh_shape mesh() const {
    mesh_shape shape;
    shape.add(axis_of<plait::dp>, dp);
    shape.add(axis_of<plait::pp>, pp);
    shape.add(axis_of<cp>, 1);
    shape.add(axis_of<plait::tp>, tp);
    shape.add(axis_of<tp_rep>, 1);
    return shape;
  }
};
std::string text_of(const layout_of_run& l) {
  return cat({"dp=", l.dp, " pp=", l.pp, " tp=", l.tp, " microbatches=", l.microbatches, " level ",
              static_cast<int>(l.level), l.canonical ? " canonical" : ""});
}

scenario small_scenario(const layout_of_run& l) {
  scenario s{small_config(8, 4)};
  s.config.hidden = 32, s.config.ffn = 64, s.config.layers = 2, s.config.head_dim = 4;
  s.batch = 8, s.seq = l.canonical ? 16 : 8;
  s.microbatches = l.microbatches;
  s.clip = 0.05;
  s.parallel.parallel = {.level = l.level, .delayed_norm = true};
  return s;
}

/// One rank that trains.
struct trained_rank {
  using model_type = llama<float, megatron_sp, cpu>;

  trained_rank(const layout_of_run& l, const threads::communicator& c)
      : s(small_scenario(l)),
        ranks(l.mesh(), any_communicator(c)),
        device({.canonical = l.canonical}),
        order(l.canonical ? numerics_under<megatron_sp>(numerics{4, 8, 4}, ranks.stage().shape()) : numerics{}),
        ctx{device, ranks.stage(),
            llama_sizes<megatron_sp>(s.config, ranks.stage().shape(), s.batch / s.microbatches, s.seq, order), 7,
            order},
        plan(make_schedule<one_f_one_b>(static_cast<int>(l.pp), static_cast<int>(l.microbatches))),
        model(
            ctx, ranks.along(), plan, split_layers({{1.0, 1.0}, 0.2, 0.7}, plan.shape.stages()),
            [&](stage_layers part, model_type* first) {
              return std::make_unique<model_type>(ctx, s.config, s.options, part, first);
            },
            s.parallel),
        step(std::in_place, ctx, model, optimizer, s.clip) {
    model.visit([&](auto& p) { p.initialize(ctx); });
  }

  void load(std::int64_t i) {
    step->load(ctx, i * s.batch, [&](std::int64_t k, auto& ids, auto& labels, host_starts&) {
      fill_tokens(s, i * s.batch + k * (s.batch / s.microbatches), ids, labels);
    });
  }
  void run(std::int64_t i) {
    load(i);
    optimizer.begin_step(ctx, 1e-2);
    step->run(ctx);
  }
  void spoil() {
    model.visit([&](auto& p) {
      p.fill_values(ctx, [&](float* v) { std::fill_n(v, p.size(), std::numeric_limits<float>::quiet_NaN()); });
    });
  }

  scenario s;
  pipeline_world ranks;
  cpu device;
  numerics order;
  context<cpu> ctx;
  schedule plan;
  pipeline<model_type> model;
  adamw<float> optimizer;
  std::optional<training_step<model_type>> step;
};

enum class asks { always, at_the_end, after_a_save };

struct outcome {
  step_result last;
  std::vector<named_values> weights;
  ledger traffic;
};

constexpr std::int64_t steps = 4;

/// Waits for other ranks without being seen to, so that a call of theirs that needs this one would not end.
template <class Condition>
void wait_unseen(const Condition& condition) {
  for (int patience = 0; !condition() && patience < 6000; ++patience)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(condition());
}

std::vector<outcome> train(const layout_of_run& l, asks when) {
  std::vector<outcome> all(static_cast<std::size_t>(l.ranks()));
  std::atomic<bool> first_knows = false, first_saved = false;
  threads::run(l.ranks(), [&](threads::communicator c) {
    trained_rank r(l, c);
    outcome& out = all[static_cast<std::size_t>(c.rank())];
    for (std::int64_t i = 0; i < steps; ++i) {
      r.run(i);
      if (when == asks::always) CHECK(r.step->result(r.ctx).gradient_norm > r.s.clip);  // or it clips nothing
      if (when == asks::after_a_save && i == 1) {
        if (c.rank() > 0) wait_unseen([&] { return first_saved.load(); });
        const std::optional<kernels::clip_numbers> kept = r.step->kept_norm(r.ctx);
        if (c.rank() == 0) first_saved = true;
        REQUIRE(kept);
        r.step.emplace(r.ctx, r.model, r.optimizer, r.s.clip);
        CHECK_FALSE(r.step->steady());
        r.step->keep_norm(r.ctx, *kept);
      }
    }
    if (c.rank() > 0 && when != asks::always) wait_unseen([&] { return first_knows.load(); });
    out.last = r.step->result(r.ctx);
    if (c.rank() == 0) first_knows = true;
    out.traffic = r.ranks.stage().ledger();
    out.weights = gather_values(r.ctx, r.model);
  });
  return all;
}

}  // namespace

TEST_CASE("a norm under way changes no bit, and who asks for it, or saves it, asks alone") {
  int compared = 0;
  for (const layout_of_run& l : {layout_of_run{2, 1, 2, 2},
                                 {2, 1, 1, 1, zero_level::optimizer},
                                 {2, 1, 1, 2, zero_level::gradients},
                                 {2, 1, 1, 2, zero_level::parameters},
                                 {1, 2, 1, 2},
                                 {2, 2, 1, 2, zero_level::optimizer},
                                 {1, 2, 2, 2, zero_level::replicated},
                                 {2, 2, 1, 2, zero_level::gradients},
                                 {2, 1, 2, 1, zero_level::optimizer, true},
                                 {2, 2, 1, 2, zero_level::replicated, true}}) {
    CAPTURE(text_of(l));
    const std::vector<outcome> waited = train(l, asks::always);
    for (const asks when : {asks::at_the_end, asks::after_a_save}) {
      CAPTURE(static_cast<int>(when));
      const std::vector<outcome> got = train(l, when);
      for (std::size_t r = 0; r < got.size(); ++r) {
        CAPTURE(r);
        CHECK(got[r].last.gradient_norm == waited[r].last.gradient_norm);
        CHECK(got[r].last.loss == waited[r].last.loss);
        CHECK(got[r].last.tokens == waited[r].last.tokens);
        REQUIRE(got[r].weights.size() == waited[r].weights.size());
        for (std::size_t i = 0; i < got[r].weights.size(); ++i)
          CHECK(got[r].weights[i].values == waited[r].weights[i].values);
        CHECK(compare_ledgers(got[r].traffic, waited[r].traffic, true).text() == "");
        ++compared;
      }
    }
  }
  CHECK(compared == 2 * (4 + 2 + 2 + 2 + 2 + 4 + 4 + 4 + 4 + 4));
}

TEST_CASE("an exception meets a norm that is under way: training ends on all ranks with what was thrown") {
  for (const layout_of_run& l : {layout_of_run{2}, {1, 2, 1, 2}, {2, 2, 1, 2, zero_level::optimizer}})
    for (const bool in_load : {true, false}) {
      CAPTURE(text_of(l));
      std::atomic<int> began = 0;
      const auto train_until = [&](threads::communicator c) {
        trained_rank r(l, c);
        for (std::int64_t i = 0; i < 2; ++i) r.run(i);
        ++began;
        if (c.rank() == l.ranks() - 1) {
          wait_unseen([&] { return began == l.ranks(); });
          if (in_load)
            r.step->load(r.ctx, 0, [](std::int64_t, auto&, auto&, host_starts&) { fail("no data is there"); });
          else
            fail("no data is there");
        }
        r.run(2);
        static_cast<void>(r.step->result(r.ctx));
      };
      CHECK_THROWS_WITH_AS(threads::run(l.ranks(), train_until), doctest::Contains("no data is there"), error);
      CHECK(began.load() == l.ranks());
    }
}

TEST_CASE("gradients that are not finite, under a norm that nobody asked for: all ranks hear of it who ask") {
  for (const layout_of_run& l : {layout_of_run{2}, {1, 2, 1, 2}, {2, 2, 1, 2, zero_level::optimizer}}) {
    CAPTURE(text_of(l));
    std::vector<std::string> said(static_cast<std::size_t>(l.ranks()));
    threads::run(l.ranks(), [&](threads::communicator c) {
      trained_rank r(l, c);
      r.run(0);
      r.spoil();
      for (std::int64_t i = 1; i < 3; ++i) r.run(i);
      try {
        static_cast<void>(r.step->result(r.ctx));
      } catch (const error& e) {
        said[static_cast<std::size_t>(c.rank())] = e.what();
      }
    });
    for (const std::string& text : said) CHECK(has(text, "with delayed_norm updates came before it"));
  }
}
