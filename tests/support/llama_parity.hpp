#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/parallel/optim/chosen_optimizer.hpp"
#include "plait/parallel/parameter_hashes.hpp"
#include "plait/plan/dry_run.hpp"
#include "plait/testing/layer_parity.hpp"
#include "support/model_parity.hpp"
#ifndef __CUDACC__
#include "support/on_mesh.hpp"
#endif

/// Trains small Llamas on a mesh and compares everything with one rank.
namespace plait::test {

using namespace plait::testing;

/// The model and the steps of a test. Every token depends on its global sample and position only, so all meshes see the
/// same data.
struct scenario {
  llama_config config;
  llama_options options{};
  std::int64_t batch = 16;  ///< sequences in a global batch
  std::int64_t seq = 16;
  std::int64_t microbatches = 1;
  std::int64_t steps = 5;
  std::int64_t masked_from = -1;  ///< labels of samples [masked_from, masked_to) of a batch are ignored; -1: none
  std::int64_t masked_to = -1;
  std::vector<std::int64_t> masked_positions{};  ///< of all samples
  bool documents = false;                        ///< whether sequences are packed from documents
  double learning_rate = 3e-3;
  optimizer_options optimizer{};
  pipeline_options parallel{};
  double clip = 1.0;
  bool late_results = false;  ///< whether only the last step's results are read

  bool asks_after(std::int64_t step) const { return !late_results || step + 1 == steps; }
};

/// Results of one rank; tensors are gathered to their full logical shape.
struct rank_outcome {
  std::vector<step_result> steps;
  std::vector<named_values> initial, first_gradients, last_gradients, weights;
  ledger measured, predicted;  ///< of the last step
  posted_program posted;       ///< collectives and messages that the dry run starts; empty without a dry run
  std::int64_t saved_predicted = 0, saved_measured = 0;
  std::uint64_t initial_hash = 0;
};

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

inline void fill_tokens(const scenario& s, std::int64_t first_sample, host_tokens& ids, host_tokens& labels) {
  ids.fill([&](std::int64_t row, std::int64_t position) {
    return learnable_token(first_sample + row, position, s.config.vocab);
  });
  labels.fill([&](std::int64_t row, std::int64_t position) {
    const std::int64_t sample = first_sample + row, in_batch = sample % s.batch;
    const bool masked = (in_batch >= s.masked_from && in_batch < s.masked_to) || (sample % 3 == 0 && position < 4) ||
                        std::count(s.masked_positions.begin(), s.masked_positions.end(), position) > 0;
    return masked ? -100 : learnable_token(sample, position + 1, s.config.vocab);
  });
}

/// Three documents in each sequence.
inline void fill_starts(const scenario& s, std::int64_t first_sample, host_starts& starts) {
  starts.fill([&](std::int64_t sample, std::int64_t position) {
    const std::int64_t first = 1 + (first_sample + sample) % 3, second = s.seq * 2 / 3;
    return position < first ? 0 : position < second ? first : second;
  });
}

/// Loads the samples of step `i`.
template <class Step, class Device>
void load_samples(const context<Device>& ctx, Step& step, const scenario& s, std::int64_t i = 0) {
  step.load(ctx, i * s.batch, [&](std::int64_t k, auto& ids, auto& labels, host_starts& starts) {
    const std::int64_t first = i * s.batch + k * (s.batch / s.microbatches);
    fill_tokens(s, first, ids, labels);
    fill_starts(s, first, starts);
  });
}
/// Trains on the samples of step `i`.
template <class Step, class Optimizer, class Device>
void run_step(const context<Device>& ctx, Step& step, Optimizer& optimizer, const scenario& s, std::int64_t i,
              double learning_rate) {
  load_samples(ctx, step, s, i);
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

/// Whether a test compares a step with its dry run. For float and bf16 on the cpu it does not: only sizes differ from
/// double there, and the layers would be compiled once more for it.
template <class T, class Device>
inline constexpr bool predicted_here = sizeof(T) == 8 || !std::is_same_v<Device, cpu>;

/// Predictions for one rank: bytes that a step sends, and that a microbatch keeps between its two passes.
struct plans {
  step_plan step;
  std::int64_t kept_bytes = 0;
};
template <class T, strategy S>
plans plan_of(const scenario& s, const mesh_shape& mesh, std::int64_t rank) {
  world ranks = world::counting(mesh, rank);
  counting_device device;
  const context<counting_device> ctx{device, ranks, microbatch_sizes<S>(s, mesh), 0};
  using model_type = llama<T, S, counting_device>;
  model_type model(ctx, s.config, s.options);
  pipeline<model_type> whole(ctx, model, static_cast<int>(s.microbatches), s.parallel);
  plans found;
  chosen_optimizer<T, counting_device> optimizer(s.optimizer);
  found.step = dry_run_step(ctx, whole, optimizer);
  gather_parameters(ctx, model);
  const typename model_type::tokens ids(ctx);
  const typename model_type::document_starts starts(ctx);
  microbatch<counting_device> mb(ctx);
  if (s.documents) mb.document_starts = starts.data();
  const auto before = static_cast<std::int64_t>(device.bytes_in_use());
  typename model_type::saved kept;
  const auto sum = model.forward(mb, ids, ids, &kept);
  found.kept_bytes = static_cast<std::int64_t>(device.bytes_in_use()) - before - 8;  // 8: the sum of losses
  return found;
}

/// Trains one rank of `ranks`.
template <class T, strategy S, class Device>
rank_outcome train_rank(const scenario& s, world& ranks, Device& device) {
  const context<Device> ctx{device, ranks, microbatch_sizes<S>(s, ranks.shape()), 20260};
  llama<T, S, Device> model(ctx, s.config, s.options);
  chosen_optimizer<T, Device> optimizer(s.optimizer);
  training_step one_step(ctx, model, optimizer, s.microbatches, s.clip, s.parallel);
  model.visit([&](auto& p) { p.initialize(ctx); });
  rank_outcome out;
  out.initial = gather_values(ctx, model);
  out.initial_hash = weights_hash(ctx, model);
  for (std::int64_t step = 0; step < s.steps; ++step) {
    ranks.ledger().clear();
    run_step(ctx, one_step, optimizer, s, step, s.learning_rate);
    if (s.asks_after(step)) out.steps.push_back(one_step.result(ctx));
    out.measured = ranks.ledger();
    if (step == 0) out.first_gradients = gather_gradients(ctx, model);
  }
  if constexpr (predicted_here<T, Device>) {
    const plans predicted = plan_of<T, S>(s, ranks.shape(), ranks.rank());
    out.predicted = predicted.step.traffic;
    out.posted = predicted.step.posted;
    out.saved_predicted = predicted.kept_bytes;
  }
  out.last_gradients = gather_gradients(ctx, model);
  out.weights = gather_values(ctx, model);

  gather_parameters(ctx, model);
  if (s.documents) {
    out.saved_predicted = 0;
    return out;
  }
  typename llama<T, S, Device>::tokens ids(ctx), labels(ctx);
  host_tokens host_ids(ids.part(), model.order()), host_labels(host_ids);
  fill_tokens(s, 0, host_ids, host_labels);
  upload(ctx, host_ids, ids);
  upload(ctx, host_labels, labels);
  const std::size_t before = device.bytes_in_use();
  {
    typename llama<T, S, Device>::saved kept;
    const auto sum = model.forward(ctx, ids, labels, &kept);
    out.saved_measured =
        static_cast<std::int64_t>(device.bytes_in_use() - before - sizeof(double));  // the sum of losses
  }
  return out;
}

#ifndef __CUDACC__
/// All ranks' outcomes, on the cpu.
template <class T, strategy S>
std::vector<rank_outcome> train_ranks(const scenario& s, const typename S::mesh& mesh) {
  std::vector<rank_outcome> all(static_cast<std::size_t>(mesh.size()));
  threads::run(static_cast<int>(mesh.size()), [&](threads::communicator c) {
    world ranks(mesh.shape(), c);
    ranks.checks().set(value_check::always);
    cpu device;
    all[static_cast<std::size_t>(ranks.rank())] = train_rank<T, S>(s, ranks, device);
  });
  return all;
}
/// The same on dp x tp ranks.
template <class T, strategy S>
std::vector<rank_outcome> train_mesh(const scenario& s, std::int64_t dp_ranks, std::int64_t tp_ranks) {
  const tensor_extents split = split_tensor_ranks(tp_ranks, s.config.kv_heads);
  return train_ranks<T, S>(s, typename S::mesh{dp_ranks, 1, split.tp, split.tp_rep});
}
#endif

inline void check_tensors(const std::vector<named_values>& a, const std::vector<named_values>& b, double tolerance,
                          const char* what) {
  REQUIRE(a.size() == b.size());
  INFO(what);
  CHECK(compare_named(a, b, tolerance).text() == "");
}

/// Compares the results of each rank with one rank. Random numbers do not depend on the mesh, so initial weights are
/// bitwise equal.
inline void check_parity(const rank_outcome& one, const rank_outcome& got, double tolerance) {
  REQUIRE(one.steps.size() == got.steps.size());
  for (std::size_t i = 0; i < one.steps.size(); ++i) {
    INFO("step " << i);
    CHECK(got.steps[i].tokens == one.steps[i].tokens);
    CHECK(std::abs(got.steps[i].loss - one.steps[i].loss) <= tolerance * std::abs(one.steps[i].loss));
    CHECK(std::abs(got.steps[i].gradient_norm - one.steps[i].gradient_norm) <= tolerance * one.steps[i].gradient_norm);
  }
  check_tensors(got.initial, one.initial, 0.0, "initial value");
  CHECK(got.initial_hash == one.initial_hash);
  check_tensors(got.first_gradients, one.first_gradients, tolerance, "gradient of the first step");
  check_tensors(got.last_gradients, one.last_gradients, tolerance, "gradient of the last step");
  check_tensors(got.weights, one.weights, tolerance, "weight after the last step");
}

template <class T>
inline constexpr double parity_tolerance = sizeof(T) == 8 ? 1e-10 : 1e-5;

/// Checks that the collectives and messages of all ranks, with those of tensor and context parallelism, have one order.
template <class Outcome>
void check_order(const std::vector<Outcome>& all) {
  std::vector<posted_program> ranks;
  for (const Outcome& one : all) ranks.push_back(one.posted);
  CHECK(describe(verify_order(ranks)) == "ok");
}

/// Compares all ranks of a mesh with `one`.
template <class T>
void check_ranks(const rank_outcome& one, const std::vector<rank_outcome>& all) {
  for (std::size_t r = 0; r < all.size(); ++r) {
    INFO("rank " << r);
    check_parity(one, all[r], parity_tolerance<T>);
    if constexpr (predicted_here<T, cpu>) {
      CHECK(compare_ledgers(all[r].measured, all[r].predicted, true).text() == "");
      CHECK(all[r].saved_measured == all[r].saved_predicted);
    }
  }
  if constexpr (predicted_here<T, cpu>) check_order(all);
}
/// Trains on dp x tp ranks and compares all of them with `one`.
template <class T, strategy S>
void check_mesh(const scenario& s, const rank_outcome& one, std::int64_t dp_ranks, std::int64_t tp_ranks) {
  INFO("dp=" << dp_ranks << " tp=" << tp_ranks << " microbatches=" << s.microbatches);
  check_ranks<T>(one, train_mesh<T, S>(s, dp_ranks, tp_ranks));
}

template <class T, strategy S>
rank_outcome train_one(const scenario& s) {
  return std::move(train_mesh<T, S>(s, 1, 1)[0]);
}

/// Every factorisation dp x tp of 1, 2, 4, 8 and 16 ranks; from tp = 4 there are fewer kv heads than ranks.
template <class T, strategy S>
void check_powers_of_two(scenario s) {
  s.config.heads = 16, s.config.kv_heads = 2, s.batch = s.seq = 16;
  const rank_outcome one = train_one<T, S>(s);
  CHECK(one.steps.back().loss < one.steps.front().loss);
  for (const std::int64_t ranks : {1, 2, 4, 8, 16})
    for (std::int64_t tp_ranks = 1; tp_ranks <= ranks; tp_ranks *= 2)
      check_mesh<T, S>(s, one, ranks / tp_ranks, tp_ranks);
}

/// Meshes of 3, 5, 6, 7, 9 and 12 ranks, which divide few of the sizes; at tp = 12 each kv head is on two ranks, and at
/// tp = 5 one rank has two.
template <class T, strategy S>
void check_odd(scenario s) {
  s.config.heads = 18, s.config.kv_heads = 6, s.config.ffn = 97, s.batch = 13, s.seq = 14;
  if (sizeof(T) == 4) {  // AdamW divides a small gradient by itself, so its rounding becomes a whole step
    s.steps = 2;
    s.optimizer = adamw_options{.epsilon = 1e-3};
  }
  const rank_outcome one = train_one<T, S>(s);
  CHECK(one.steps.back().loss < one.steps.front().loss);
  using mesh_of = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [dp_ranks, tp_ranks] :
       {mesh_of{3, 1}, {1, 3}, {5, 1}, {1, 5}, {3, 2}, {2, 3}, {1, 6}, {7, 1}, {3, 3}, {3, 5}, {2, 6}, {1, 12}})
    check_mesh<T, S>(s, one, dp_ranks, tp_ranks);
}

/// Every factorisation of 2, 4 and 8 ranks that a scenario's sizes allow.
template <class T, strategy S>
void check_some(const scenario& s) {
  const rank_outcome one = train_one<T, S>(s);
  using mesh_of = std::pair<std::int64_t, std::int64_t>;
  for (const auto& [dp_ranks, tp_ranks] : {mesh_of{2, 1}, {1, 2}, {4, 1}, {2, 2}, {1, 4}, {4, 2}, {2, 4}, {1, 8}})
    check_mesh<T, S>(s, one, dp_ranks, tp_ranks);
}

}  // namespace plait::test
