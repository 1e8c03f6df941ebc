// program: training_step
// Recompute by layer in whole steps: no bit changes, and a rank keeps the bytes that the dry run predicts and the
// budget allows.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plait/parallel/world.hpp"
#include "plait/schedule/parse.hpp"
#include "support/llama_parity.hpp"
#include "support/texts.hpp"
#include "train_llama/fit_recompute.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// A Llama of six layers on a pipeline, with a tensor-parallel pair in each stage.
struct recomputed_run {
  scenario s{small_config(8, 4)};
  schedule plan;
  mesh_shape mesh;
  deterministic_leaves order{};

  recomputed_run(const char* name, int ranks, int microbatches) : plan(parse_schedule(name, ranks, microbatches)) {
    s.config.layers = 6;
    s.config.vocab = 60;
    s.seq = s.batch = 8;
    s.microbatches = microbatches;
    mesh = pipeline_mesh{1, ranks, 2}.shape(s.config.kv_heads);
  }

  template <class Device>
  context<Device> context_of(Device& device, world& w) const {
    return {device, w, llama_sizes<megatron_sp>(s.config, w.shape(), s.batch / s.microbatches, s.seq, order), 1, order};
  }
  std::vector<stage_layers> parts() const {
    return split_layers(stage_costs{std::vector<double>(6, 1.0), 0, 0}, plan.shape.stages());
  }

  template <class Device>
  pipeline<llama<double, megatron_sp, Device>> make(const context<Device>& ctx, any_communicator along,
                                                    const layer_recompute& keep) const {
    llama_options options;
    options.keep = keep;
    return {ctx, std::move(along), plan, parts(), [&](stage_layers part, llama<double, megatron_sp, Device>* first) {
              return std::make_unique<llama<double, megatron_sp, Device>>(ctx, s.config, options, part, first);
            }};
  }

  /// The modes of a rank's layers that fit in a budget.
  recompute_fit fit(std::int64_t rank, std::int64_t budget) const {
    pipeline_world ranks = pipeline_world::counting(mesh, rank);
    counting_device device;
    const context<counting_device> ctx = context_of(device, ranks.stage());
    auto stages = make(ctx, ranks.along(), {});
    gather_parameters(ctx, stages);
    zero_gradients(ctx, stages);
    return fit_recompute(ctx, stages.stages(), plan, ranks.along().rank(), budget);
  }
};

/// Measured and predicted bytes of the ranks of a run, by rank.
struct held {
  std::vector<std::uint64_t> weights;
  std::vector<std::int64_t> kept, predicted, activation;
};

/// Two steps, with the modes from `keep(rank)`.
template <class Keep>
held train(const recomputed_run& run, Keep&& keep) {
  const auto n = static_cast<std::size_t>(run.mesh.size());
  held out{std::vector<std::uint64_t>(n), std::vector<std::int64_t>(n), std::vector<std::int64_t>(n),
           std::vector<std::int64_t>(n)};
  threads::run(static_cast<int>(n), [&](threads::communicator c) {
    pipeline_world ranks(run.mesh, any_communicator(c), nullptr);
    cpu device;
    const context<cpu> ctx = run.context_of(device, ranks.stage());
    const auto r = static_cast<std::size_t>(c.rank());
    const layer_recompute mine = keep(c.rank());
    auto model = run.make(ctx, ranks.along(), mine);
    adamw<double> optimizer;
    training_step step(ctx, model, optimizer, 1.0);
    model.visit([&](auto& p) { p.initialize(ctx); });
    for (int i = 0; i < 2; ++i) {
      load_step(ctx, step, run.s.setup(), i);
      optimizer.begin_step(ctx, 1e-3);
      const auto before = static_cast<std::int64_t>(device.bytes_in_use());
      std::vector<pipeline_event> events;
      model.executor().events = &events;
      step.run(ctx);
      model.executor().events = nullptr;
      static_cast<void>(step.result(ctx));
      out.kept[r] = 0;
      for (const pipeline_event& e : events)
        out.kept[r] = std::max(out.kept[r], static_cast<std::int64_t>(e.memory) - before);
    }
    out.weights[r] = weights_hash(ctx, model);
    out.activation[r] = tensor<double, typename transformer_specs<megatron_sp>::residual, cpu>(ctx).size() * 8;

    pipeline_world counted = pipeline_world::counting(run.mesh, c.rank());
    counting_device counts;
    const context<counting_device> there = run.context_of(counts, counted.stage());
    auto same = run.make(there, counted.along(), mine);
    out.predicted[r] = dry_run_step(there, same).kept_bytes;
  });
  return out;
}

}  // namespace

TEST_CASE("one rank of a pipeline keeps exactly the priced bytes of its layers") {
  const recomputed_run run("gpipe", 1, 4);
  const recompute_fit all = run.fit(0, INT64_MAX / 4), refused = run.fit(0, 1);
  CHECK(refused.stages.empty());
  CHECK(refused.least < all.bytes / 2);
  const held none = train(run, [](int) { return layer_recompute(); });
  std::vector<std::int64_t> budgets{all.bytes, refused.least};
  for (int i = 1; i < 8; ++i) budgets.push_back(refused.least + (all.bytes - refused.least) * i / 8);
  for (const std::int64_t budget : budgets) {
    const recompute_fit fit = run.fit(0, budget);
    REQUIRE(fit.stages.size() == 1);
    CHECK(fit.bytes <= budget);
    const held some = train(run, [&](int) { return fit.stages[0]; });
    CHECK(some.weights == none.weights);
    for (std::size_t r = 0; r < 2; ++r) {
      CHECK(some.kept[r] == fit.bytes);
      CHECK(some.kept[r] == some.predicted[r]);
    }
  }
  CHECK(run.fit(0, refused.least).bytes == refused.least);
  CHECK(run.fit(0, refused.least - 1).stages.empty());
  CHECK(run.fit(0, refused.least - 1).least == refused.least);
}

TEST_CASE("deterministic sums of gradients do not count, and a microbatch is priced as one of its step") {
  for (const char* name : {"1f1b", "zb_v"}) {
    CAPTURE(name);
    recomputed_run usual(name, 2, 4);
    usual.s.config.tie_embeddings = true;  // on zb_v, both ends are on one rank
    recomputed_run deterministic = usual;
    deterministic.order = {2, usual.s.batch, 1};
    for (std::int64_t rank = 0; rank < 4; ++rank) {
      const std::int64_t least = usual.fit(rank, 0).least, most = usual.fit(rank, INT64_MAX / 4).bytes;
      CHECK(deterministic.fit(rank, 0).least == least);
      CHECK(deterministic.fit(rank, INT64_MAX / 4).bytes == most);
      CHECK(deterministic.fit(rank, (least + most) / 2).bytes == usual.fit(rank, (least + most) / 2).bytes);
    }
  }
}

TEST_CASE("no mode of any layer changes a bit, under any kind of schedule, and budgets hold beside messages") {
  for (const char* name : {"1f1b", "interleaved:2", "zb_h1", "zb_v"}) {
    CAPTURE(name);
    const recomputed_run run(name, 2, 4);
    const held none = train(run, [](int) { return layer_recompute(); });
    constexpr recompute all = recompute::none, some_of_it = recompute::selective, input = recompute::full;
    for (const layer_recompute& keep :
         {layer_recompute(some_of_it), layer_recompute(input), layer_recompute::every(2), layer_recompute::every(3),
          layer_recompute({input, all, some_of_it, some_of_it, all, input}, all)}) {
      const held some = train(run, [&](int) { return keep; });
      CHECK(some.weights == none.weights);
      for (std::size_t r = 0; r < 4; ++r) {
        // With deferred weight gradients, the bytes that wait for them may be most of it.
        if (run.plan.name.str() == "1f1b") CHECK(some.kept[r] < none.kept[r]);
        // A message may or may not have arrived.
        CHECK(std::abs(some.kept[r] - some.predicted[r]) <= some.predicted[r] / 50 + 2 * some.activation[r]);
      }
    }
    // Half of the bytes that recomputation can save.
    std::vector<std::int64_t> budget;
    std::vector<recompute_fit> fits;
    for (int r = 0; r < 4; ++r) {
      const std::int64_t most = run.fit(r, INT64_MAX / 4).bytes, least = run.fit(r, 0).least;
      CHECK(least <= most);
      if (run.plan.name.str() == "1f1b") CHECK(least < most);
      budget.push_back((most + least) / 2);
      fits.push_back(run.fit(r, budget.back()));
      REQUIRE(!fits.back().stages.empty());
    }
    const auto of_rank = [&](int rank) {  // the lists of a rank's chunks, joined
      std::vector<recompute> layers(6, recompute::none);
      recompute head = recompute::none;
      std::vector<stage_layers> mine;
      const int stage_rank = static_cast<int>(run.mesh.coordinate(rank, axis_of<pp>));
      for (int chunk = 0; chunk < run.plan.shape.chunks; ++chunk) {
        const stage_layers part = run.parts()[static_cast<std::size_t>(run.plan.shape.stage_of(stage_rank, chunk))];
        const layer_recompute& list = fits[static_cast<std::size_t>(rank)].stages[static_cast<std::size_t>(chunk)];
        for (std::int64_t i = part.begin; i < part.end; ++i) layers[static_cast<std::size_t>(i)] = list.of_layer(i);
        if (part.last) head = list.of_head();
      }
      return layer_recompute(layers, head);
    };
    const held some = train(run, of_rank);
    CHECK(some.weights == none.weights);
    for (std::size_t r = 0; r < 4; ++r) {
      CHECK(fits[r].bytes <= budget[r]);
      CHECK(some.kept[r] >= fits[r].bytes);
      CHECK(some.kept[r] <= fits[r].bytes + 6 * some.activation[r]);  // messages in flight
    }
  }
}
