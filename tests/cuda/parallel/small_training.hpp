// Six training steps of a small Llama in bf16 on a GPU, as steps or as a recorded one.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "plait/comm/threads/cuda.hpp"
#include "plait/parallel/graph_step.hpp"
#include "support/llama_parity.hpp"

namespace plait::test {

inline scenario small_scenario() {
  scenario s;
  s.config = small_config(4, 2);
  s.config.head_dim = 8;
  s.batch = 4;
  s.seq = 8;
  s.microbatches = 2;
  return s;
}

using small_model = llama<bf16, megatron_sp, cuda>;

/// Runs body(context) on in-process ranks that share a GPU, with `batch` samples in a microbatch of all ranks.
template <class Body>
void on_gpu(const scenario& s, std::int64_t ranks, std::int64_t batch, const Body& body,
            const cuda::options& device_options = {}) {
  threads::run(static_cast<int>(ranks), device_options, [&](threads::communicator c, cuda& device) {
    world mesh(megatron_sp::mesh{ranks, 1, 1, 1}.shape(), c);
    body(context<cuda>{device, mesh, llama_sizes<megatron_sp>(s.config, mesh.shape(), batch, s.seq), 7});
  });
}

/// A small model with initial weights, its optimizer, and their steps.
struct small_run {
  small_run(const context<cuda>& c, const scenario& of, bool recorded, const pipeline_options& how = {})
      : ctx(c), s(of), as_graph(recorded), model(c, s.config, s.options), optimizer(s.optimizer) {
    initialize();
    step.emplace(ctx, model, optimizer, s.microbatches, 1.0, how);
    replayed.emplace(ctx, *step);
  }
  void initialize() {
    model.visit([&](auto& p) { p.initialize(ctx); });
  }
  /// Trains on the samples of step `i`, and returns the loss.
  double train(std::int64_t i) {
    step->load(ctx, i * s.batch, [&](std::int64_t m, auto& ids, auto& labels) {
      fill_tokens(s, i * s.batch + m * s.batch / s.microbatches, ids, labels);
    });
    optimizer.begin_step(ctx, 1e-3 * static_cast<double>(i + 1));
    as_graph ? replayed->run(ctx) : step->run(ctx);
    return step->result(ctx).loss;
  }

  const context<cuda>& ctx;
  const scenario& s;
  bool as_graph;
  small_model model;
  chosen_optimizer<bf16, cuda> optimizer;
  std::optional<training_step<small_model>> step{};
  std::optional<graph_step<training_step<small_model>>> replayed{};
};

struct training_outcome {
  std::vector<double> losses{};
  std::uint64_t weights = 0;        ///< their hash, after the last step
  std::size_t peak_bytes = 0;       ///< of the device, from the third step on
  std::size_t host_bytes = 0;       ///< offloaded
  std::size_t optimizer_bytes = 0;  ///< masters and moments
};

/// With `interrupted`, all weights are set before the fifth step.
inline training_outcome train_small(const scenario& s, bool as_graph, bool interrupted = false,
                                    const cuda::options& device_options = {}, bool offload_activations = false) {
  training_outcome out;
  const auto body = [&](const context<cuda>& ctx) {
    small_run run(ctx, s, as_graph, {.offload_activations = offload_activations});
    for (std::int64_t i = 0; i < 6; ++i) {
      if (interrupted && i == 4) run.initialize();
      if (i == 2) ctx.device.reset_peak();
      out.losses.push_back(run.train(i));
    }
    CHECK(run.replayed->replaying() == as_graph);
    out.weights = weights_hash(ctx, run.model);
    out.peak_bytes = ctx.device.peak_bytes();
    out.host_bytes = ctx.device.host_bytes_in_use();
    run.model.visit([&](auto& p) {
      out.optimizer_bytes +=
          static_cast<std::size_t>(p.size()) * sizeof(float) +
          moment_bytes<bf16>(s.optimizer, p.info(), p.size(), p.array_offset() % kernels::moment_block);
    });
  };
  on_gpu(s, 1, s.batch / s.microbatches, body, device_options);
  return out;
}

/// All optimizers, with each kind of state.
inline std::vector<optimizer_options> every_optimizer() {
  return {adamw_options{}, adamw_options{.moments = moment_type::bf16}, adamw_options{.moments = moment_type::int8},
          muon_options{}, muon_options{.adamw = {.moments = moment_type::bf16}}};
}

}  // namespace plait::test
