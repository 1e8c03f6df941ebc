// program: training_step
// Activations in the host's memory between their passes: not a bit changes under any schedule, and the device holds
// less.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plait/parallel/world.hpp"
#include "plait/plan/dry_run.hpp"
#include "plait/schedule/parse.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// A Llama of six layers on a pipeline, whose stages are cut `sharded` times over cp and over tp.
struct offload_run {
  scenario s{small_config(8, 4)};
  schedule plan;
  mesh_shape mesh;
  recompute keep;

  offload_run(const char* name, int ranks, int microbatches, recompute policy, int sharded = 1)
      : plan(parse_schedule(name, ranks, microbatches)), keep(policy) {
    s.config.layers = 6;
    s.config.vocab = 60;
    s.seq = 8;
    s.microbatches = microbatches;
    mesh.add(axis_of<dp>, 1);
    mesh.add(axis_of<pp>, ranks);
    mesh.add(axis_of<cp>, sharded);
    mesh.add(axis_of<tp>, sharded);
    mesh.add(axis_of<tp_rep>, 1);
  }

  template <class Device>
  context<Device> context_of(Device& device, world& w) const {
    return {device, w, llama_sizes<megatron_sp>(s.config, w.shape(), s.batch / s.microbatches, s.seq), 1};
  }
  template <class Device>
  auto make(const context<Device>& ctx, any_communicator along, bool offloads) const {
    using stage = llama<double, megatron_sp, Device>;
    llama_options options;
    options.keep = keep;
    pipeline_options how;
    how.offload_activations = offloads;
    const std::vector<stage_layers> parts =
        split_layers(stage_costs{std::vector<double>(6, 1.0), 0, 0}, plan.shape.stages());
    return pipeline<stage>(
        ctx, std::move(along), plan, parts,
        [&](stage_layers part, stage* first) { return std::make_unique<stage>(ctx, s.config, options, part, first); },
        how);
  }

  /// The hash of the weights after two steps, and a loss.
  std::pair<std::uint64_t, double> train(bool offloads) const {
    std::pair<std::uint64_t, double> out;
    threads::run(static_cast<int>(mesh.size()), [&](threads::communicator c) {
      pipeline_world ranks(mesh, any_communicator(c), nullptr);
      cpu device;
      const context<cpu> ctx = context_of(device, ranks.stage());
      auto model = make(ctx, ranks.along(), offloads);
      adamw<double> optimizer;
      training_step step(ctx, model, optimizer, 1.0);
      model.visit([&](auto& p) { p.initialize(ctx); });
      const std::size_t before = device.bytes_in_use();
      for (int i = 0; i < 2; ++i) {
        step.load(ctx, i * s.batch, [&](std::int64_t k, auto& ids, auto& labels) {
          fill_tokens(s, i * s.batch + k * s.batch / s.microbatches, ids, labels);
        });
        optimizer.begin_step(ctx, 1e-3);
        step.run(ctx);
      }
      CHECK(device.bytes_in_use() >= before);
      const std::uint64_t hash = weights_hash(ctx, model);
      const double loss = step.result(ctx).loss;
      if (c.rank() == 0) out = {hash, loss};
    });
    return out;
  }

  /// The dry run of a rank.
  step_plan dry_run(std::int64_t rank, bool offloads) const {
    pipeline_world ranks = pipeline_world::counting(mesh, rank);
    counting_device device;
    const context<counting_device> ctx = context_of(device, ranks.stage());
    auto model = make(ctx, ranks.along(), offloads);
    return dry_run_step(ctx, model);
  }
};

}  // namespace

TEST_CASE("offloaded activations change no bit, under any schedule and mode of recompute") {
  for (const char* name : {"gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_v"})
    for (const recompute keep : {recompute::none, recompute::selective, recompute::full}) {
      CAPTURE(name);
      const offload_run run(name, 2, 4, keep);
      CHECK(run.train(true) == run.train(false));
    }
}

TEST_CASE("gathered inputs and keys of a ring come back too") {
  for (const recompute keep : {recompute::none, recompute::full}) {
    const offload_run run("1f1b", 1, 2, keep, 2);
    CHECK(run.train(true) == run.train(false));
  }
}

TEST_CASE("a device holds fewer activations where they are offloaded") {
  for (const recompute keep : {recompute::none, recompute::full}) {
    const offload_run run("1f1b", 1, 1, keep);
    CHECK(run.train(true) == run.train(false));
    const step_plan here = run.dry_run(0, false), away = run.dry_run(0, true);
    CHECK(here.host_bytes == 0);
    // What the embedding and the first five blocks keep is in the host's memory, two blocks' at most on the device.
    CHECK(away.host_bytes > here.kept_bytes / 2);
    CHECK(away.kept_bytes < here.kept_bytes / 2);
  }
}

TEST_CASE("what cannot be offloaded, or not for any time, is refused") {
  using stage = llama<double, megatron_sp, counting_device>;
  struct closed : stage {
    using stage::stage;
    void visit_kept() = delete;
  };
  struct one_unit : stage {
    using stage::stage;
    void units() = delete;
  };
  const offload_run run("1f1b", 1, 2, recompute::none);
  pipeline_world ranks = pipeline_world::counting(run.mesh, 0);
  counting_device device;
  const context<counting_device> ctx = run.context_of(device, ranks.stage());
  const auto refused = [&](auto& model, const char* text) {
    using made = std::remove_reference_t<decltype(model)>;
    CHECK_THROWS_WITH_AS(pipeline<made>(ctx, model, 2, {.offload_activations = true}), text, error);
  };
  closed no_way_in(ctx, run.s.config, llama_options());
  refused(no_way_in, "pipeline: offload_activations is for models that have visit_kept(unit, saved, f); legal is 0");
  one_unit used_at_once(ctx, run.s.config, llama_options());
  refused(used_at_once,
          "pipeline: offload_activations = 1 would change nothing, because the backward pass of each unit follows its "
          "forward pass too soon; legal is 0");
}
