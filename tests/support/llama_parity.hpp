#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/parallel/pipeline.hpp"
#include "plait/plan/dry_run.hpp"
#include "support/model_parity.hpp"
#ifndef __CUDACC__
#include "support/on_mesh.hpp"
#endif

/// Trains small Llamas on meshes and pipelines, and compares everything with one rank.
namespace plait::test {

using namespace plait::testing;

/// The model and the steps of a test. Every token depends on its global sample and position only, so all meshes see the
/// same data.
struct scenario : model_setup {
  llama_config config;
  llama_options options{};
  std::int64_t seq = 16;
  std::int64_t masked_from = -1;  ///< labels of samples [masked_from, masked_to) of a batch are ignored; -1: none
  std::int64_t masked_to = -1;
  std::vector<std::int64_t> masked_positions{};  ///< of all samples

  scenario(const llama_config& model = {}) : config(model) { batch = 16, microbatches = 1, steps = 5, seed = 20260; }

  /// The setup of the model, without the sizes of dims, which depend on the strategy.
  model_setup setup() const {
    model_setup how = *this;
    how.layers = config.layers, how.vocab = config.vocab;
    how.ignored = [from = masked_from, to = masked_to, n = batch, positions = masked_positions](std::int64_t sample,
                                                                                                std::int64_t position) {
      return (sample % n >= from && sample % n < to) || std::count(positions.begin(), positions.end(), position) > 0;
    };
    return how;
  }
};

using small_llama = llama<double, megatron_sp, cpu>;

inline llama_config small_config(std::int64_t heads = 16, std::int64_t kv_heads = 2) {
  llama_config c;
  c.vocab = 61;
  c.hidden = 48;
  c.layers = 2;
  c.heads = heads;
  c.kv_heads = kv_heads;
  c.head_dim = 4;
  c.ffn = 96;
  c.initializer_range = 0.1;
  return c;
}

/// Six layers, and sequences of 8 tokens.
inline scenario deep() {
  scenario s{small_config(8, 4)};
  s.config.layers = 6;
  s.seq = 8;
  return s;
}

inline void fill_tokens(const scenario& s, std::int64_t first_sample, host_tokens& ids, host_tokens& labels) {
  testing::fill_tokens(s.setup(), first_sample, ids, labels);
}

/// Trains on the samples of step `i`.
template <class Step, class Optimizer, class Device>
void run_step(const context<Device>& ctx, Step& step, Optimizer& optimizer, const scenario& s, std::int64_t i,
              double learning_rate) {
  load_step(ctx, step, s.setup(), i);
  optimizer.begin_step(ctx, learning_rate);
  step.run(ctx);
}

/// The sizes of a microbatch on a mesh.
template <strategy S>
dim_sizes microbatch_sizes(const scenario& s, const mesh_shape& mesh) {
  return llama_sizes<S>(s.config, mesh, s.batch / s.microbatches, s.seq);
}
#ifndef __CUDACC__
/// Runs work(ctx) on each of dp x tp ranks, with the sizes of a microbatch.
template <class Work>
void on_llama_mesh(std::int64_t dp_ranks, std::int64_t tp_ranks, const scenario& s, std::uint64_t seed, Work&& work) {
  const megatron_sp::mesh mesh{dp_ranks, 1, tp_ranks, 1};
  on_mesh(mesh, microbatch_sizes<megatron_sp>(s, mesh.shape()), seed, work);
}
#endif

inline constexpr zero_level all_levels[] = {zero_level::replicated, zero_level::optimizer, zero_level::gradients,
                                            zero_level::parameters};

/// This rank's stages of a scenario's model.
template <class Stage, class Device>
pipeline<Stage> make_stages(const context<Device>& ctx, any_communicator along, const scenario& s,
                            const schedule& plan) {
  const auto make = [&](stage_layers part, Stage* first) {
    return std::make_unique<Stage>(ctx, s.config, s.options, part, first);
  };
  return testing::make_stages<Stage>(ctx, std::move(along), s.config.layers, plan, s.parallel, make);
}

/// Makes stages of a Llama, for support/model_parity.hpp.
template <class T, strategy S>
auto make_llama(const llama_config& config, const llama_options& options) {
  return [=](const auto& ctx, stage_layers part, auto first) {
    return std::make_unique<llama<T, S, device_of<decltype(ctx)>>>(ctx, config, options, part, first);
  };
}

template <class T, strategy S>
model_setup setup_of(const scenario& s) {
  model_setup how = s.setup();
  how.sizes = [config = s.config, seq = s.seq](const mesh_shape& mesh, std::int64_t samples) {
    return llama_sizes<S>(config, mesh, samples, seq);
  };
  how.tolerance = sizeof(T) == 8 ? 1e-10 : 1e-5;
  return how;
}

/// A mesh of `pp` stages, each on dp x cp x tp ranks.
struct pipeline_mesh {
  std::int64_t dp = 1, pp = 1, tp = 1, cp = 1;
  std::int64_t size() const { return dp * pp * tp * cp; }
  mesh_shape shape(std::int64_t kv_heads) const {
    const tensor_extents split = split_tensor_ranks(tp, kv_heads);
    return mesh<axis<plait::dp>, axis<plait::pp>, axis<plait::cp>, axis<plait::tp>, axis<tp_rep>>{dp, pp, cp, split.tp,
                                                                                                  split.tp_rep}
        .shape();
  }
};

template <strategy S>
mesh_shape mesh_of(const scenario& s, std::int64_t dp_ranks, std::int64_t tp_ranks, std::int64_t cp_ranks = 1) {
  const tensor_extents split = split_tensor_ranks(tp_ranks, s.config.kv_heads);
  return typename S::mesh{dp_ranks, cp_ranks, split.tp, split.tp_rep}.shape();
}

/// All ranks' outcomes.
template <class T, strategy S, class Launch = on_cpu>
std::vector<model_outcome> train_ranks(const scenario& s, const mesh_shape& mesh, const Launch& launch = {}) {
  const auto make = make_llama<T, S>(s.config, s.options);
  return train_on(mesh, setup_of<T, S>(s), make, nullptr, launch);
}
/// The same on dp x tp ranks.
template <class T, strategy S>
std::vector<model_outcome> train_mesh(const scenario& s, std::int64_t dp_ranks, std::int64_t tp_ranks) {
  return train_ranks<T, S>(s, mesh_of<S>(s, dp_ranks, tp_ranks));
}
template <class T, strategy S, class Launch = on_cpu>
model_outcome train_one(const scenario& s, const Launch& launch = {}) {
  return std::move(train_ranks<T, S>(s, mesh_of<S>(s, 1, 1), launch)[0]);
}

inline void check_tensors(const std::vector<named_values>& a, const std::vector<named_values>& b, double tolerance,
                          const char* what) {
  REQUIRE(a.size() == b.size());
  INFO(what);
  CHECK(compare_named(a, b, tolerance).text() == "");
}

/// Compares the results of a rank with the whole model with one rank.
inline void check_parity(const model_outcome& one, const model_outcome& got, double tolerance) {
  model_setup how;
  how.tolerance = tolerance;
  CHECK(got.parameters == one.parameters);
  CHECK(compare_models(got, one, how).text() == "");
}

/// Compares all ranks of a mesh with `one`; with a plan, they are a pipeline.
template <class T, strategy S, class Launch = on_cpu>
void check_ranks(const scenario& s, const model_outcome& one, const mesh_shape& mesh, const schedule* plan = nullptr,
                 const Launch& launch = {}) {
  INFO("microbatches=" << s.microbatches);
  const auto make = make_llama<T, S>(s.config, s.options);
  CHECK(check_model_on(mesh, setup_of<T, S>(s), one, make, plan, launch).text() == "");
}
/// Compares dp x tp ranks with `one`.
template <class T, strategy S>
void check_mesh(const scenario& s, const model_outcome& one, std::int64_t dp_ranks, std::int64_t tp_ranks) {
  check_ranks<T, S>(s, one, mesh_of<S>(s, dp_ranks, tp_ranks));
}
template <class T, strategy S, class Launch = on_cpu>
void check_pipeline(const scenario& s, const model_outcome& one, const pipeline_mesh& m, const schedule& plan,
                    const Launch& launch = {}) {
  check_ranks<T, S>(s, one, m.shape(s.config.kv_heads), &plan, launch);
}

/// Compares dp x tp ranks, for each pair, with one rank.
template <class T, strategy S>
void check_meshes(const scenario& s, std::initializer_list<std::pair<std::int64_t, std::int64_t>> meshes) {
  const model_outcome one = train_one<T, S>(s);
  CHECK(one.steps.back().loss < one.steps.front().loss);
  for (const auto& [dp_ranks, tp_ranks] : meshes) check_mesh<T, S>(s, one, dp_ranks, tp_ranks);
}

/// Every factorisation of 2, 4 and 8 ranks that a scenario's sizes allow.
template <class T, strategy S>
void check_some(const scenario& s) {
  check_meshes<T, S>(s, {{2, 1}, {1, 2}, {4, 1}, {2, 2}, {1, 4}, {4, 2}, {2, 4}, {1, 8}});
}

}  // namespace plait::test
