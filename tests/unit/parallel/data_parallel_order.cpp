// program: data_parallel
// The order of a step's communication with policies of data parallelism: delays of operations change no bit, with and
// without a pipeline.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "support/llama_parity.hpp"
#include "support/on_mesh.hpp"
#include "support/slow_link.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using in_zigzag = context_parallel<megatron_sp, chosen<cp>, zigzag>;

/// A link with random delays: a call takes up to a millisecond, and one in four starts late. Seed 0: no delay.
testing::link_time random_delays(unsigned seed, int rank) {
  std::minstd_rand random(seed * 100 + static_cast<unsigned>(rank) + 1);
  return [random, seed](const call&, double, double now) mutable {
    if (seed == 0) return now;
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
    return now + static_cast<double>(random() % 1000) * 1e-6;
  };
}

}  // namespace

TEST_CASE("delays of operations change no bit") {
  scenario s = deep();
  s.config.layers = 3;
  s.batch = 8, s.microbatches = 2;
  for (const zero_level level : all_levels) {
    std::vector<std::uint64_t> hashes;
    for (const unsigned seed : {0u, 1u, 2u, 3u}) {
      std::vector<std::uint64_t> all(8);
      threads::run(8, [&](threads::communicator c) {
        world w(megatron_sp::mesh{2, 2, 2, 1}.shape(),
                any_communicator(testing::slow_communicator(c, random_delays(seed, c.rank()))));
        cpu device;
        scenario mine = s;
        mine.steps = 2;
        mine.parallel.parallel.level = level;
        mine.parallel.parallel.prefetch = level == zero_level::parameters ? 2 : 1;
        const context<cpu> ctx{device, w, microbatch_sizes<in_zigzag>(s, w.shape()), 1};
        llama<double, in_zigzag, cpu> model(ctx, s.config);
        adamw<double> optimizer;
        training_step step(ctx, model, optimizer, s.microbatches, 1.0, mine.parallel);
        step.model().visit([&](auto& p) { p.initialize(ctx); });
        for (int i = 0; i < 2; ++i) {
          run_step(ctx, step, optimizer, s, i, 1e-3);
          static_cast<void>(step.result(ctx));
        }
        all[static_cast<std::size_t>(c.rank())] = weights_hash(ctx, step.model());
      });
      CHECK(std::count(all.begin(), all.end(), all[0]) == 8);
      hashes.push_back(all[0]);
    }
    CAPTURE(static_cast<int>(level));
    CHECK(std::count(hashes.begin(), hashes.end(), hashes[0]) == 4);
  }
}

namespace {

/// Trains two chunks on each of two stages, of dp x cp = 2 x 2 ranks. Returns the hash of the results and the last
/// norm.
std::pair<std::uint64_t, double> train_with_delays(const scenario& s, const schedule& plan, unsigned seed) {
  const mesh<axis<dp>, axis<pp>, axis<cp>, axis<tp>, axis<tp_rep>> shape{2, 2, 2, 1, 1};
  std::vector<std::pair<std::uint64_t, double>> all(8);
  threads::run(8, [&](threads::communicator c) {
    pipeline_world ranks(shape.shape(), any_communicator(testing::slow_communicator(c, random_delays(seed, c.rank()))));
    cpu device;
    world& stage = ranks.stage();
    const context<cpu> ctx{device, stage, microbatch_sizes<in_zigzag>(s, stage.shape()), 1};
    auto model = make_stages<llama<double, in_zigzag, cpu>>(ctx, ranks.along(), s, plan);
    adamw<double> optimizer;
    training_step step(ctx, model, optimizer, s.clip);
    model.visit([&](auto& p) { p.initialize(ctx); });
    auto& [hash, norm] = all[static_cast<std::size_t>(c.rank())];
    for (std::int64_t i = 0; i < s.steps; ++i) {
      run_step(ctx, step, optimizer, s, i, 1e-3);
      norm = step.result(ctx).gradient_norm;
    }
    hash = weights_hash(ctx, model);
  });
  CHECK(std::count(all.begin(), all.end(), all[0]) == 8);
  return all[0];
}

}  // namespace

TEST_CASE("delays change no bit in a pipeline with a hybrid and gathers two uses early") {
  scenario s = deep();
  s.config.layers = 5;
  s.batch = 8, s.microbatches = 4, s.steps = 2;
  s.clip = 0.5;
  const schedule plan = make_schedule<zb_v>(2, 4);
  for (const bool tied : {false, true})
    for (const zero_level level : {zero_level::gradients, zero_level::parameters}) {
      s.config.tie_embeddings = tied;
      s.parallel.parallel = {.level = level};
      if (level == zero_level::parameters) s.parallel.parallel.prefetch = 2;
      s.parallel.axes = {.shard = axis_list(axis_of<dp>), .replicate = axis_list(axis_of<cp>)};
      const auto undisturbed = train_with_delays(s, plan, 0);
      CAPTURE(tied);
      CAPTURE(static_cast<int>(level));
      for (const unsigned seed : {1u, 2u, 3u}) CHECK(train_with_delays(s, plan, seed) == undisturbed);
    }
}

TEST_CASE("values that ranks exchange around the norm travel before the gathers of a step") {
  const scenario s = deep();
  for (const zero_level level : {zero_level::replicated, zero_level::optimizer, zero_level::gradients}) {
    pipeline_options how{.parallel = {.level = level}};
    on_llama_mesh(2, 1, s, 1, [&](const context<cpu>& ctx) {
      small_llama model(ctx, s.config);
      adamw<double> optimizer;
      training_step step(ctx, model, optimizer, 1, 1.0, how);
      model.visit([&](auto& p) { p.initialize(ctx); });
      step.model().gather_changed(ctx);
      any_communicator asking = ctx.ranks.root().split(0, ctx.ranks.rank());
      double value = 0;
      request in_flight;
      int begun = 0, ended = 0;
      const auto gathers = [&] { return ctx.ranks.ledger().total("dp", collective::all_gather).calls; };
      std::uint64_t before = 0;
      step.on_norm(
          [&] {
            ++begun;
            CHECK(gathers() == before);
            value = ctx.ranks.rank() + 10.0 * begun;
            asking.start_all_reduce(&value, &value, 1, dtype::f64, reduce_op::max).swap(in_flight);
          },
          [&] {
            CHECK(++ended == begun);
            in_flight.wait();
            CHECK(value == 1 + 10.0 * begun);
            CHECK(gathers() == before);
          });
      for (int i = 0; i < 2; ++i) {
        before = gathers();
        run_step(ctx, step, optimizer, s, i, 1e-3);
        CHECK(ended == i + 1);
        CHECK((gathers() > before) == (level != zero_level::replicated));
      }
      step.model().wait_for_transfers();
    });
  }
}
