// program: data_parallel
// Clipping by the norm of the step before: equal to one rank that does so by hand, under every policy; and what happens
// to gradients that are not finite.
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <thread>
#include <vector>

#include "plait/train/optim/gradient_norm.hpp"
#include "plait/train/optim/muon.hpp"
#include "support/llama_parity.hpp"
#include "support/slow_link.hpp"
#include "support/texts.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using one_llama = llama<double, megatron_sp, cpu>;

scenario clipped() {
  scenario s{small_config(8, 4)};
  s.steps = 4;
  s.seq = 8;
  s.clip = 0.5;
  s.parallel.parallel.delayed_norm = true;
  return s;
}

/// One rank, with nothing but layers, a norm and an optimizer. Step i clips by the norm of step i - 1, the first by its
/// own; where `exact`, all by their own.
struct reference {
  std::vector<double> norms;
  std::vector<named_values> weights;
};
reference train_by_hand(const scenario& s, bool exact) {
  reference out;
  threads::run(1, [&](threads::communicator c) {
    world w(megatron_sp::mesh{1, 1, 1, 1}.shape(), c);
    cpu device;
    const context<cpu> ctx{device, w, llama_sizes<megatron_sp>(s.config, w.shape(), s.batch, s.seq), 20260};
    one_llama model(ctx, s.config);
    model.visit([&](auto& p) { p.initialize(ctx); });
    adamw<double> optimizer;
    one_llama::tokens ids(ctx), labels(ctx);
    one_llama::mean mean(ctx);
    for (std::int64_t i = 0; i < s.steps; ++i) {
      host_tokens host_ids(ids.part(), model.order()), host_labels(host_ids);
      fill_tokens(s, i * s.batch, host_ids, host_labels);
      upload(ctx, host_ids, ids);
      upload(ctx, host_labels, labels);
      std::int64_t counted = 0;
      for (std::int64_t t = 0; t < host_labels.size(); ++t) counted += host_labels.data()[t] != -100;
      mean.count(ctx, counted);
      mean.begin(ctx);
      gather_parameters(ctx, model);
      zero_gradients(ctx, model);
      one_llama::saved kept;
      mean.add(ctx, model.forward(ctx, ids, labels, &kept));
      model.backward(ctx, ids, labels, kept, mean.seed());
      std::vector<reduced_gradient<double, cpu>> gradients;
      gradient_norm<double> norm;
      model.visit([&](auto& p) { gradients.push_back(p.reduce(ctx)); });
      for (const auto& g : gradients) norm.add(ctx, g);
      out.norms.push_back(norm.total(ctx));
      const double by = exact || i == 0 ? out.norms.back() : out.norms[out.norms.size() - 2];
      optimizer.begin_step(ctx, s.learning_rate, clip_factor(by, s.clip));
      optimizer.update(ctx, gradients);
    }
    out.weights = gather_values(ctx, model);
  });
  return out;
}

}  // namespace

TEST_CASE("a step clips by the norm of the one before, and the first by its own, under every policy") {
  scenario s = clipped();
  const reference by_hand = train_by_hand(s, false), exact = train_by_hand(s, true);
  for (const double norm : by_hand.norms) CHECK(norm > s.clip);  // or nothing is clipped
  CHECK(compare_named(by_hand.weights, exact.weights, 1e-6).text() != "");
  int runs = 0;
  for (const zero_level level :
       {zero_level::replicated, zero_level::optimizer, zero_level::gradients, zero_level::parameters})
    for (const std::int64_t microbatches : {1, 2})
      for (const bool overlap : {true, false}) {
        s.parallel.parallel.level = level;
        s.parallel.parallel.overlap = overlap;
        s.microbatches = microbatches;
        CAPTURE(static_cast<int>(level));
        for (const rank_outcome& got : train_mesh<double, megatron_sp>(s, 2, 2)) {
          check_tensors(got.weights, by_hand.weights, 1e-10, "weight after the last step");
          for (std::size_t i = 0; i < by_hand.norms.size(); ++i)
            CHECK(std::abs(got.steps[i].gradient_norm - by_hand.norms[i]) <= 1e-10 * by_hand.norms[i]);
          ++runs;
        }
      }
  CHECK(runs == 4 * 2 * 2 * 4);
  s.parallel = {};  // the exact norm is another algorithm, and the default
  for (const rank_outcome& got : train_mesh<double, megatron_sp>(s, 2, 1))
    check_tensors(got.weights, exact.weights, 1e-10, "weight after the last step");
}

namespace {

/// An optimizer, and how many reductions of gradients this rank had started at each of its updates.
template <class O>
struct watched {
  O of;
  world& ranks;
  std::vector<std::uint64_t> reductions{};
  std::function<void(std::size_t)> before_update{};

  void begin_step(const context<cpu>& ctx, double rate) { of.begin_step(ctx, rate); }
  void clip_by(const context<cpu>& ctx, const kernels::clip_numbers* n) { of.clip_by(ctx, n); }
  void forget_step() { of.forget_step(); }
  std::int64_t step() const { return of.step(); }
  void prepare(const context<cpu>& ctx, const parameter<double, cpu>& p) { of.prepare(ctx, p); }
  void update(const context<cpu>& ctx, std::span<reduced_gradient<double, cpu>> gradients) {
    if (before_update) before_update(reductions.size());
    reductions.push_back(ranks.ledger().total("dp", collective::reduce_scatter).calls);
    of.update(ctx, gradients);
  }
};

}  // namespace

TEST_CASE("where nothing is clipped, owners of Muon's matrices update them while other gradients travel") {
  std::vector<std::vector<named_values>> weights[2];
  std::vector<std::uint64_t> at[2];
  for (const bool early : {false, true}) {
    weights[early].resize(2);
    std::atomic<bool> updates = false;
    threads::run(2, [&](threads::communicator c) {
      scenario s = clipped();
      s.parallel.parallel = {.level = zero_level::gradients, .delayed_norm = early};
      s.parallel.cut = bucket_cut::whole;
      int reduced = 0;  // rank 1 takes part in the last of the first step when rank 0 has begun to update
      const testing::link_time link = [&, me = c.rank()](const call& what, double, double now) {
        if (early && me == 1 && what.kind == collective::reduce_scatter && ++reduced == 4) {
          for (int patience = 0; !updates && patience < 2000; ++patience)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          CHECK(updates);
        }
        return now;
      };
      world w(megatron_sp::mesh{2, 1, 1, 1}.shape(), any_communicator(testing::slow_communicator(c, link)));
      cpu device;
      const context<cpu> ctx{device, w, llama_sizes<megatron_sp>(s.config, w.shape(), s.batch, s.seq), 1};
      one_llama model(ctx, s.config);
      watched<muon<double>> optimizer{muon<double>(), w};
      optimizer.before_update = [&](std::size_t) {
        if (w.rank() == 0) updates = true;
      };
      training_step step(ctx, model, optimizer, 1, 0.0, s.parallel);
      step.model().visit([&](auto& p) { p.initialize(ctx); });
      CHECK(step.steady());
      for (int i = 0; i < 3; ++i) {
        w.ledger().clear();
        optimizer.reductions.clear();
        step.load(ctx, 0, [&](std::int64_t, auto& ids, auto& labels, host_starts&) { fill_tokens(s, 0, ids, labels); });
        optimizer.begin_step(ctx, 1e-2);
        step.run(ctx);
        CHECK_FALSE(step.result(ctx).skipped);
        CHECK_FALSE(step.kept_norm(ctx));
        if (i == 0 && w.rank() == 0) at[early] = optimizer.reductions;  // of the first step, as of every other
      }
      weights[early][static_cast<std::size_t>(w.rank())] = gather_values(ctx, step.model());
    });
  }
  for (std::size_t r = 0; r < 2; ++r) CHECK(compare_named(weights[0][r], weights[1][r], 0.0).text() == "");
  // Units: the embedding, two blocks and the head, of which each has one reduction, and all of them are on their way.
  for (const auto& reductions : at) CHECK(reductions == std::vector<std::uint64_t>{4, 4, 4, 4});
}

TEST_CASE("whoever has made its updates goes on, and a norm that nobody asks for is there for the next step's") {
  const scenario s = clipped();
  const reference by_hand = train_by_hand(s, false);
  std::atomic<bool> first_is_through = false;
  std::vector<step_result> last(2);
  threads::run(2, [&](threads::communicator c) {
    world w(megatron_sp::mesh{2, 1, 1, 1}.shape(), c);
    cpu device;
    const context<cpu> ctx{device, w, llama_sizes<megatron_sp>(s.config, w.shape(), s.batch, s.seq), 20260};
    one_llama model(ctx, s.config);
    watched<adamw<double>> optimizer{adamw<double>(), w};
    training_step step(ctx, model, optimizer, 1, s.clip, s.parallel);
    step.model().visit([&](auto& p) { p.initialize(ctx); });
    int begun = 0, ended = 0;
    step.around_norm([&] { ++begun; }, [&] { ++ended; });
    for (std::int64_t i = 0; i < s.steps; ++i) {
      step.load(ctx, i * s.batch,
                [&](std::int64_t, auto& ids, auto& labels, host_starts&) { fill_tokens(s, i * s.batch, ids, labels); });
      optimizer.begin_step(ctx, s.learning_rate);
      optimizer.reductions.clear();
      // The last of the four units' updates, when all reductions are on their way: rank 1 ends its step after rank 0.
      if (i == 1 && w.rank() == 1)
        optimizer.before_update = [&](std::size_t update) {
          for (int patience = 0; update == 3 && !first_is_through && patience < 2000; ++patience)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          if (update == 3) CHECK(first_is_through);
        };
      step.run(ctx);
      if (i == 1 && w.rank() == 0) first_is_through = true;
      optimizer.before_update = {};
      CHECK(begun == i + 1);
      CHECK(ended == (i == 0 ? 1 : i));  // the first step's own, and then each in the next step
    }
    last[static_cast<std::size_t>(w.rank())] = step.result(ctx);
    CHECK(ended == s.steps);
    check_tensors(gather_values(ctx, step.model()), by_hand.weights, 1e-10, "weight after the last step");
  });
  for (const step_result& r : last) {
    CHECK(std::abs(r.gradient_norm - by_hand.norms.back()) <= 1e-10 * by_hand.norms.back());
    CHECK(r.loss > 0.1);
  }
}

TEST_CASE("a training step without a norm is refused") {
  threads::run(1, [&](threads::communicator c) {
    scenario s = clipped();
    s.parallel.parallel = {.clip = false};
    world w(megatron_sp::mesh{1, 1, 1, 1}.shape(), c);
    cpu device;
    const context<cpu> ctx{device, w, llama_sizes<megatron_sp>(s.config, w.shape(), s.batch, s.seq), 1};
    one_llama model(ctx, s.config);
    adamw<double> optimizer;
    CHECK_THROWS_WITH_AS((training_step(ctx, model, optimizer, 1, 0.0, s.parallel)),
                         "training step: data_parallel::clip = 0 leaves out the norm, by which a step knows that its "
                         "gradients are finite; legal is 1, with a limit of 0 where nothing is to be clipped, and with "
                         "delayed_norm where no update is to wait for it",
                         error);
  });
}

namespace {

/// One of two ranks in the middle of training, whose gradients can be made not finite.
struct clipped_rank {
  explicit clipped_rank(threads::communicator c)
      : w(megatron_sp::mesh{2, 1, 1, 1}.shape(), c),
        ctx{device, w, llama_sizes<megatron_sp>(s.config, w.shape(), s.batch, s.seq), 1},
        model(ctx, s.config),
        step(ctx, model, optimizer, 1, s.clip, s.parallel) {
    step.model().visit([&](auto& p) { p.initialize(ctx); });
  }
  void run() {
    step.load(ctx, 0, [&](std::int64_t, auto& ids, auto& labels, host_starts&) { fill_tokens(s, 0, ids, labels); });
    optimizer.begin_step(ctx, 1e-3);
    step.run(ctx);
  }
  bool skips() { return run(), step.result(ctx).skipped; }
  void set_last_norm(double value) {
    step.model().visit([&](auto& p) {
      if (p.name() == "model.norm.weight")
        p.fill_values(ctx, [&](double* values) { std::fill_n(values, p.size(), value); });
    });
  }
  void spoil() { set_last_norm(std::numeric_limits<double>::quiet_NaN()); }
  void mend() { set_last_norm(1.0); }
  std::uint64_t hash() { return weights_hash(ctx, step.model()); }
  std::string complaint() {
    try {
      step.result(ctx);
      return "";
    } catch (const error& e) {
      return e.what();
    }
  }

  const scenario s = clipped();
  world w;
  cpu device;
  const context<cpu> ctx;
  one_llama model;
  adamw<double> optimizer;
  training_step<one_llama> step;
};

}  // namespace

TEST_CASE("gradients that are not finite: a first step is skipped, and a later one ends training on all ranks") {
  std::vector<std::string> said(2);
  std::vector<int> skipped(2);
  threads::run(2, [&](threads::communicator c) {
    clipped_rank one(c);
    const auto r = static_cast<std::size_t>(c.rank());
    const std::uint64_t before = one.hash();
    one.spoil();
    skipped[r] += one.skips();
    one.mend();
    CHECK(one.hash() == before);
    CHECK_FALSE(one.step.steady());
    skipped[r] += one.skips();  // the first again
    CHECK(one.step.steady());
    skipped[r] += one.skips();
    one.spoil();
    one.run();
    said[r] = one.complaint();
    // The weights are loaded again, and training goes on with a first step.
    one.step.model().visit([&](auto& p) { p.initialize(one.ctx); });
    CHECK_FALSE(one.step.steady());
    const std::uint64_t loaded = one.hash();
    skipped[r] += one.skips();
    CHECK(one.hash() != loaded);
  });
  CHECK(skipped == std::vector<int>{1, 1});
  for (const std::string& text : said) {
    CHECK(has(text, "the gradient norm is nan, and with delayed_norm updates came before it, so that the weights are"));
    CHECK(has(text, "load the last checkpoint, or use the exact norm"));
  }
}

TEST_CASE("what was not finite in a step that nobody asked about is known in the next, or told at the next question") {
  std::vector<std::string> said(2);
  threads::run(2, [&](threads::communicator c) {
    clipped_rank one(c);
    one.spoil();
    one.run();  // nobody asks: the next is a first one all the same
    one.mend();
    const std::uint64_t before = one.hash();
    CHECK_FALSE(one.skips());
    CHECK(one.hash() != before);
    CHECK(one.optimizer.step() == 1);
    one.spoil();
    one.run();  // nobody asks: its weights are spoilt
    one.step.model().visit([&](auto& p) { p.initialize(one.ctx); });
    one.run();  // whose own norm is finite
    said[static_cast<std::size_t>(c.rank())] = one.complaint();
    CHECK_FALSE(one.step.steady());
  });
  for (const std::string& text : said)
    CHECK(has(text, "the gradient norm was not finite in a step before, and with delayed_norm updates came before it"));
}

TEST_CASE("a kept norm clips to the limit of the step that takes it") {
  std::vector<double> factors(2);
  threads::run(2, [&](threads::communicator c) {
    clipped_rank one(c);
    one.step.keep_norm(one.ctx, {.norm = 8.0, .factor = 0.01, .update = 1.0});
    CHECK(one.step.steady());
    factors[static_cast<std::size_t>(c.rank())] = one.step.kept_norm(one.ctx)->factor;
  });
  for (const double factor : factors) CHECK(factor == 0.5 / (8.0 + 1e-6));
}
