// program: training_step
// Hashes of parameters and gradients: the same list on every mesh, with every policy of data parallelism and over the
// stages of pipelines. Also the hash of all weights that is made from them, and one different bit.
#include "plait/parallel/parameter_hashes.hpp"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plait/models/llama_stages.hpp"
#include "plait/parallel/world.hpp"
#include "plait/schedule/generators.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct run_of_hashes {
  std::vector<parameter_hash> initial, trained;
  std::uint64_t initial_sum = 0, trained_sum = 0;
  std::uint64_t sent = 0;  ///< bytes of the hashes in the ledger, after they are subtracted
};

/// Two steps on dp x pp x tp ranks; every rank must have the returned list.
run_of_hashes train_hashed(const scenario& s, std::int64_t dp_ranks, std::int64_t tp_ranks, const schedule& plan) {
  const mesh_shape shape = pipeline_mesh{dp_ranks, plan.shape.ranks, tp_ranks}.shape(s.config.kv_heads);
  std::vector<run_of_hashes> all(static_cast<std::size_t>(shape.size()));
  threads::run(static_cast<int>(shape.size()), [&](threads::communicator c) {
    pipeline_world ranks(shape, any_communicator(c));
    cpu device;
    const context<cpu> ctx{device, ranks.stage(), microbatch_sizes<megatron_sp>(s, ranks.stage().shape()), 20260};
    auto model = make_stages<small_llama>(ctx, ranks.along(), s, plan);
    adamw<double> optimizer;
    model.visit([&](auto& p) { p.initialize(ctx); });
    run_of_hashes& out = all[static_cast<std::size_t>(ranks.root().rank())];
    out.initial = parameter_hashes(ctx, model);
    out.initial_sum = weights_hash(ctx, model);
    training_step step(ctx, model, optimizer, s.clip);
    for (std::int64_t i = 0; i < s.steps; ++i) {
      run_step(ctx, step, optimizer, s, i, s.learning_rate);
      static_cast<void>(step.result(ctx));
    }
    model.wait_for_transfers();
    const ledger before = ranks.stage().ledger();
    out.trained = parameter_hashes(ctx, model, true);
    CHECK((shape.size() == 1 || ranks.stage().ledger().total().calls > before.total().calls));
    ranks.stage().ledger().restore(before);
    out.sent = ranks.stage().ledger().total().wire - before.total().wire;
    out.trained_sum = weights_hash(ctx, model);
  });
  for (const run_of_hashes& other : all) {
    CHECK(other.initial == all[0].initial);
    CHECK(other.trained == all[0].trained);
    CHECK(other.sent == 0);
  }
  return all[0];
}

scenario scenario_of(bool tied, zero_level level = zero_level::replicated) {
  scenario s{small_config(8, 4)};
  s.config.layers = 5;
  s.config.tie_embeddings = tied;
  s.seq = 8;
  s.microbatches = 2;
  s.steps = 2;
  s.clip = 0;
  s.parallel.parallel.level = level;
  return s;
}

std::vector<std::string> names_of(const std::vector<parameter_hash>& all) {
  std::vector<std::string> names;
  for (const parameter_hash& p : all) names.push_back(p.name);
  return names;
}

}  // namespace

TEST_CASE("the list is the same on every mesh, and in the model's order over the stages of every pipeline") {
  for (const bool tied : {false, true}) {
    CAPTURE(tied);
    const run_of_hashes one = train_hashed(scenario_of(tied), 1, 1, make_schedule<one_f_one_b>(1, 2));
    REQUIRE(one.initial.size() == (tied ? 2u : 3u) + 9 * 5);
    CHECK(one.initial.front().name == "model.embed_tokens.weight");
    CHECK(one.initial[1].name.starts_with("model.layers.0."));
    CHECK(one.initial.back().name == (tied ? "model.norm.weight" : "lm_head.weight"));
    CHECK(weights_hash(one.initial) == one.initial_sum);
    CHECK(weights_hash(one.trained) == one.trained_sum);
    CHECK(std::none_of(one.initial.begin(), one.initial.end(), [](auto& p) { return p.gradient.has_value(); }));
    CHECK(std::all_of(one.trained.begin(), one.trained.end(), [](auto& p) { return p.gradient.has_value(); }));
    for (std::size_t i = 0; i < one.initial.size(); ++i) CHECK(one.initial[i].value != one.trained[i].value);

    // If all sums have the same terms in the same order, every bit is equal.
    for (const schedule& plan : {make_schedule<one_f_one_b>(2, 2), make_schedule<interleaved<2>>(2, 2),
                                 make_schedule<zb_v>(2, 2), make_schedule<one_f_one_b>(5, 2)}) {
      CAPTURE(plan.name.str());
      const run_of_hashes piped = train_hashed(scenario_of(tied), 1, 1, plan);
      CHECK(piped.initial == one.initial);
      CHECK(names_of(piped.trained) == names_of(one.trained));
      if (!tied) CHECK(piped.trained == one.trained);  // the two gradients of a tied table are summed separately
    }
    const run_of_hashes tensor = train_hashed(scenario_of(tied), 1, 2, make_schedule<one_f_one_b>(1, 2));
    CHECK(tensor.initial == one.initial);
    CHECK(names_of(tensor.trained) == names_of(one.trained));
    CHECK(tensor.trained != one.trained);
    const run_of_hashes whole = train_hashed(scenario_of(tied), 2, 2, make_schedule<one_f_one_b>(1, 2));
    for (const zero_level level : {zero_level::optimizer, zero_level::gradients, zero_level::parameters}) {
      CAPTURE(static_cast<int>(level));
      const run_of_hashes cut = train_hashed(scenario_of(tied, level), 2, 2, make_schedule<one_f_one_b>(1, 2));
      CHECK(cut.initial == one.initial);
      CHECK(cut.trained == whole.trained);
      CHECK(train_hashed(scenario_of(tied, level), 2, 1, make_schedule<zb_v>(2, 2)).initial == one.initial);
    }
  }
}

TEST_CASE("the hash of all weights does not change between versions") {
  const run_of_hashes one = train_hashed(scenario_of(false), 1, 1, make_schedule<one_f_one_b>(1, 2));
  std::uint64_t by_hand = 0;
  const scenario s = scenario_of(false);
  on_llama_mesh(1, 1, s, 20260, [&](const context<cpu>& ctx) {
    small_llama model(ctx, s.config);
    model.visit([&](auto& p) {
      p.initialize(ctx);
      std::int64_t count = 1;
      for (const std::int64_t n : p.info().shape) count *= n;
      std::uint64_t hash = 14695981039346656037ull;
      const auto add = [&](const void* bytes, std::size_t size) {
        for (std::size_t i = 0; i < size; ++i)
          hash = (hash ^ static_cast<const unsigned char*>(bytes)[i]) * 1099511628211ull;
      };
      add(p.name().data(), p.name().size());
      add(std::as_const(p).value(), static_cast<std::size_t>(count) * sizeof(double));
      by_hand += hash ^ (hash >> 32);
    });
    CHECK(weights_hash(ctx, model) == by_hand);
  });
  CHECK(one.initial_sum == by_hand);
}

TEST_CASE("one changed bit changes one hash; a frozen parameter has no gradient's hash") {
  const scenario s = scenario_of(false);
  on_llama_mesh(1, 2, s, 1, [&](const context<cpu>& ctx) {
    small_llama model(ctx, s.config);
    model.visit([&](auto& p) { p.initialize(ctx); });
    model.visit([&](auto& p) {
      if (p.name() == "model.layers.1.mlp.up_proj.weight") p.freeze();
    });
    gather_parameters(ctx, model);
    zero_gradients(ctx, model);
    reduce_all(ctx, model);
    const std::vector<parameter_hash> before = parameter_hashes(ctx, model, true);
    model.visit([&](auto& p) {
      if (p.name() == "model.layers.3.mlp.down_proj.weight" && ctx.ranks.rank() == 1)
        p.value()[7] = std::nextafter(p.value()[7], 10.0);
    });
    const std::vector<parameter_hash> after = parameter_hashes(ctx, model, true);
    REQUIRE(after.size() == before.size());
    for (std::size_t i = 0; i < after.size(); ++i) {
      CAPTURE(after[i].name);
      CHECK((after[i].value != before[i].value) == (after[i].name == "model.layers.3.mlp.down_proj.weight"));
      CHECK(after[i].gradient == before[i].gradient);
      CHECK(after[i].gradient.has_value() == (after[i].name != "model.layers.1.mlp.up_proj.weight"));
    }
  });
  CHECK(hex_text(0) == "0000000000000000");
  CHECK(hex_text(0x0123456789abcdefull) == "0123456789abcdef");
}
