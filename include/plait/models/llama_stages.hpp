// The costs of the parts of a Llama, counted or measured, for balancing stages and simulating schedules.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/models/llama.hpp"
#include "plait/schedule/schedule.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// The times of the parts of a Llama for one microbatch, forward and backward, in any unit.
struct llama_part_times {
  action_times layer, embedding, head;  ///< head: the final norm, the output projection and the loss
};

/// Returns the multiplications of each part per token. Each of the three passes has equally many, so a whole backward
/// pass costs two forward passes. Causal attention counts half. `layer` is the mean of all layers, which differ if only
/// some have experts.
constexpr llama_part_times llama_part_flops(const llama_config& c, std::int64_t seq) {
  const auto times = [](std::int64_t multiplications) {
    const double flops = 2.0 * static_cast<double>(multiplications);
    return action_times{flops, 2 * flops, flops, flops};
  };
  const std::int64_t projections = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads) +
                                   detail::feed_forward_count(c, c.mixture.router.chosen) / c.layers;
  return {times(projections + c.heads * c.head_dim * seq), times(0), times(c.hidden * c.vocab)};
}

namespace detail {

/// Measures the parts of a Llama, each by its shortest run. Collective over the mesh of the stage.
template <class Model, compute_device Device>
class llama_stopwatch {
 public:
  explicit llama_stopwatch(const context<Device>& ctx) : ctx_(ctx), mb_(ctx), ids_(ctx), labels_(ctx) {
    mb_.deferred = &later_;
    zero(ids_);
    zero(labels_);
  }

  /// Runs a model of one layer with embedding and head once. `whole` receives the time of embedding and layer together.
  void run(Model& model, action_times& whole, action_times& head) {
    typename Model::saved kept;
    typename Model::activation x;
    typename Model::gradient dy;
    timed(whole.forward, [&] { x = model.forward_layers(mb_, ids_, {}, &kept); });
    timed(head.forward, [&] { model.forward_loss(mb_, std::move(x), labels_, &kept); });
    timed(head.input_backward, [&] { dy = model.backward_loss(mb_, labels_, kept, seed_); });
    timed(head.weight_backward, [&] { later_.run(); });
    timed(whole.input_backward, [&] { model.backward_layers(mb_, ids_, kept, std::move(dy)); });
    timed(whole.weight_backward, [&] { later_.run(); });
  }
  /// Runs a stage of one layer once.
  void run(Model& layer, action_times& alone) {
    typename Model::saved kept;
    typename Model::activation x(ctx_);
    typename Model::gradient dy(ctx_);
    zero(x);
    zero(dy);
    timed(alone.forward, [&] { x = layer.forward_layers(mb_, ids_, std::move(x), &kept); });
    timed(alone.input_backward, [&] { dy = layer.backward_layers(mb_, ids_, kept, std::move(dy)); });
    timed(alone.weight_backward, [&] { later_.run(); });
  }

  /// Returns the times of the slowest rank.
  action_times slowest(action_times t) const {
    for (double* time : {&t.forward, &t.input_backward, &t.weight_backward})
      *time = all_reduce_scalar(ctx_, std::max(*time, 0.0), reduce_op::max);
    t.backward = t.input_backward + t.weight_backward;
    return t;
  }

 private:
  template <class Tensor>
  void zero(Tensor& x) {
    ctx_.device.zero(x.data(), static_cast<std::size_t>(x.size()) * sizeof(*x.data()), ctx_.device.main_stream());
  }
  template <class Work>
  void timed(double& best, Work&& work) {
    using clock = std::chrono::steady_clock;
    ctx_.device.synchronize();
    const auto start = clock::now();
    work();
    ctx_.device.synchronize();
    best = std::min(best, std::chrono::duration<double>(clock::now() - start).count());
  }

  const context<Device>& ctx_;
  weight_work later_;
  microbatch<Device> mb_;
  typename Model::tokens ids_, labels_;
  const typename Model::mean::seed_type seed_ = Model::mean::seed_type::weighted(ctx_, 0.0);
};

}  // namespace detail

/// Returns the seconds of each part on this mesh, measured with a model of one layer: the shortest of `rounds`, on the
/// slowest rank. Collective over the mesh of the stage; the result is equal on its ranks.
template <class Model, compute_device Device>
llama_part_times measure_llama_parts(const context<Device>& ctx, const llama_config& config,
                                     const llama_options& options, int rounds = 3) {
  const value_checks::pause unchecked(ctx.ranks.checks());
  llama_config one = config;
  one.layers = 1;
  one.mixture.dense_layers = 0;  // measures a layer with experts, since most layers have them
  const auto ready = [&](Model& m) {
    initialize(ctx, m);
    gather_parameters(ctx, m);
    zero_gradients(ctx, m);
  };
  Model model(ctx, one, options);
  ready(model);
  Model layer(ctx, one, options, {0, 1, false, false});
  ready(layer);
  detail::llama_stopwatch<Model, Device> watch(ctx);
  constexpr action_times never{1e30, 1e30, 1e30, 1e30};
  action_times whole = never, alone = never, head = never;
  for (int i = 0; i < rounds; ++i) {
    watch.run(model, whole, head);
    watch.run(layer, alone);
  }
  const action_times embedding{whole.forward - alone.forward, 0, whole.input_backward - alone.input_backward,
                               whole.weight_backward - alone.weight_backward};
  return {watch.slowest(alone), watch.slowest(embedding), watch.slowest(head)};
}

/// Returns the costs by which stages are balanced.
inline stage_costs stage_costs_of(const llama_part_times& t, std::int64_t layers) {
  const auto all = [](const action_times& a) { return a.forward + a.backward; };
  return {std::vector<double>(static_cast<std::size_t>(layers), all(t.layer)), all(t.embedding), all(t.head)};
}

/// Returns the costs of the actions of stages with these layers, for a simulation.
inline schedule_costs schedule_costs_of(const llama_part_times& t, const std::vector<stage_layers>& parts,
                                        double link = 0) {
  schedule_costs costs;
  costs.link = link;
  for (const stage_layers& part : parts) {
    const auto sum = [&](double action_times::*time) {
      return static_cast<double>(part.size()) * t.layer.*time + (part.first ? t.embedding.*time : 0) +
             (part.last ? t.head.*time : 0);
    };
    costs.stages.push_back({sum(&action_times::forward), sum(&action_times::backward),
                            sum(&action_times::input_backward), sum(&action_times::weight_backward)});
  }
  return costs;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
