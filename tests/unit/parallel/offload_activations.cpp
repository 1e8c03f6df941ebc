// program: training_step
// Activations in host memory between their passes: no bit changes with any schedule, and the device needs less memory.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "plait/models/mixture_llama.hpp"
#include "plait/parallel/world.hpp"
#include "plait/plan/dry_run.hpp"
#include "plait/schedule/parse.hpp"
#include "support/llama_parity.hpp"

using namespace plait;
using namespace plait::test;

namespace {

struct dense {
  using strategy = megatron_sp;
  template <class Device>
  using stage = llama<double, strategy, Device>;
  static constexpr bool has_experts = false;
};
/// A model with experts, with the policy of context parallelism named by `chosen_policy`.
struct mixture {
  using strategy = context_parallel<megatron_experts, chosen<cp>, contiguous>;
  template <class Device>
  using stage = mixture_llama<double, strategy, Device>;
  static constexpr bool has_experts = true;
};

/// A Llama of six layers on a pipeline, whose stages are sharded `sharded` times over each of ep, cp and tp.
template <class Model>
struct offload_run {
  template <class Device>
  using stage = typename Model::template stage<Device>;
  scenario s{small_config(8, 4)};
  schedule plan;
  mesh_shape mesh;

  offload_run(const char* name, int ranks, int microbatches, recompute policy, int sharded = 1,
              chosen_policy context = chosen_policy::ring)
      : plan(parse_schedule(name, ranks, microbatches)) {
    s.options.keep = policy;
    s.options.attention.context = context;
    if (Model::has_experts)
      s.config.mixture = {.experts = 4, .router = {.chosen = 2}, .shared_ffn = 8, .shared_gate = true};
    s.config.layers = 6;
    s.config.vocab = 60;
    s.seq = s.batch = 8;
    s.microbatches = microbatches;
    mesh.add(axis_of<dp>, 1);
    mesh.add(axis_of<pp>, ranks);
    if (Model::has_experts) mesh.add(axis_of<ep>, sharded);
    mesh.add(axis_of<cp>, sharded);
    mesh.add(axis_of<tp>, sharded);
    mesh.add(axis_of<tp_rep>, 1);
  }

  template <class Device>
  context<Device> context_of(Device& device, world& w) const {
    return {device, w, microbatch_sizes<typename Model::strategy>(s, w.shape()), 1};
  }
  template <class Device>
  auto make(const context<Device>& ctx, any_communicator along, bool offloads) const {
    scenario how = s;
    how.parallel.offload_activations = offloads;
    return make_stages<stage<Device>>(ctx, std::move(along), how, plan);
  }

  /// The hash of the weights after two steps, and the loss.
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
      for (int i = 0; i < 2; ++i) run_step(ctx, step, optimizer, s, i, 1e-3);
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

constexpr auto all_modes = {recompute::none, recompute::selective, recompute::full};

/// Recomputation changes no bit either, so one run without offloading serves all modes.
template <class Make>
void check_bits(std::initializer_list<recompute> modes, Make make) {
  const auto expected = make(recompute::none).train(false);
  for (const recompute keep : modes) {
    CAPTURE(name_of(keep));
    CHECK(make(keep).train(true) == expected);
  }
}

}  // namespace

TEST_CASE("offloaded activations change no bit, with any schedule and mode of recompute") {
  for (const char* name : {"gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_v"}) {
    CAPTURE(name);
    check_bits(all_modes, [&](recompute keep) { return offload_run<dense>(name, 2, 4, keep); });
  }
}

TEST_CASE("gathered inputs and keys of a ring are restored") {
  check_bits({recompute::none, recompute::full},
             [](recompute keep) { return offload_run<dense>("1f1b", 1, 2, keep, 2); });
}

TEST_CASE("rows of experts, the choice, and saved values of each context-parallel policy are restored") {
  for (const chosen_policy context : {chosen_policy::ring, chosen_policy::all_gather_kv, chosen_policy::ulysses})
    check_bits(all_modes, [&](recompute keep) {
      offload_run<mixture> run("1f1b", 1, 2, keep, 2, context);
      run.s.config.layers = 3;
      return run;
    });
}

namespace {

/// There are six blocks, and one microbatch goes through one stage.
template <class Model>
void check_bytes(const offload_run<Model>& run) {
  CHECK(run.train(true) == run.train(false));
  const step_plan here = run.dry_run(0, false), away = run.dry_run(0, true);
  CHECK(here.host_bytes == 0);
  // The host has the activations of the embedding and the first five blocks; the device has those of two blocks at
  // most.
  CHECK(away.host_bytes > here.kept_bytes / 2);
  CHECK(away.kept_bytes < here.kept_bytes / 2);
}

}  // namespace

TEST_CASE("a device holds fewer activations with offloading") {
  for (const recompute keep : {recompute::none, recompute::full}) {
    check_bytes(offload_run<dense>("1f1b", 1, 1, keep));
    check_bytes(offload_run<mixture>("1f1b", 1, 1, keep, 2, chosen_policy::ulysses));
  }
}

TEST_CASE("activations that cannot be offloaded, or with no time for it, are refused") {
  using stage = llama<double, megatron_sp, counting_device>;
  struct closed : stage {
    using stage::stage;
    void visit_kept() = delete;
  };
  struct one_unit : stage {
    using stage::stage;
    void units() = delete;
  };
  const offload_run<dense> run("1f1b", 1, 2, recompute::none);
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
