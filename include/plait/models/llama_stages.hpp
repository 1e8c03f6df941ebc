// The costs of the parts of a Llama, counted or measured: numbers to balance stages and simulate schedules by.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/models/llama.hpp"
#include "plait/schedule/simulate.hpp"
#include "plait/tensor/all_reduce_scalar.hpp"

namespace plait {

/// The costs of the parts of a Llama for one microbatch, forward and backward, in any unit.
struct llama_part_times {
  action_times layer, embedding, head;  ///< head: the final norm, the output projection and the loss
};

/// The multiplications of the parts, per token: in each pass as many, so that a whole backward pass costs two forward
/// passes. Causal attention is counted half.
constexpr llama_part_times llama_part_flops(const llama_config& c, std::int64_t seq) {
  const auto times = [](std::int64_t multiplications) {
    const double flops = 2.0 * static_cast<double>(multiplications);
    return action_times{flops, 2 * flops, flops, flops};
  };
  const std::int64_t projections = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads) + 3 * c.hidden * c.ffn;
  return {times(projections + c.heads * c.head_dim * seq), times(0), times(c.hidden * c.vocab)};
}

/// Seconds of the parts on this mesh, measured with a model of one layer: the shortest of `rounds`, of the slowest
/// rank. Collective over the mesh of the stage; the result is the same on its ranks.
template <class Precision, strategy S, compute_device Device>
llama_part_times measure_llama_parts(const context<Device>& ctx, const llama_config& config,
                                     const llama_options& options, int rounds = 3) {
  using model_type = llama<Precision, S, Device>;
  using clock = std::chrono::steady_clock;
  const value_checks::pause unchecked(ctx.ranks.checks());
  llama_config one = config;
  one.layers = 1;
  model_type model(ctx, one, options);
  const auto ready = [&](model_type& m) {
    m.visit([&](auto& p) { p.initialize(ctx); });
    gather_parameters(ctx, m);
    zero_gradients(ctx, m);
  };
  ready(model);
  model_type layer(ctx, one, options, {0, 1, false, false});
  ready(layer);
  typename model_type::tokens ids(ctx), labels(ctx);
  ctx.device.zero(ids.data(), static_cast<std::size_t>(ids.size()) * sizeof(std::int64_t), ctx.device.main_stream());
  ctx.device.zero(labels.data(), static_cast<std::size_t>(labels.size()) * sizeof(std::int64_t),
                  ctx.device.main_stream());
  const auto seed = model_type::mean::seed_type::weighted(ctx, 0.0);

  weight_work later;
  microbatch<Device> mb(ctx);
  mb.deferred = &later;
  const auto timed = [&](double& best, auto&& work) {
    ctx.device.synchronize();
    const auto start = clock::now();
    work();
    ctx.device.synchronize();
    best = std::min(best, std::chrono::duration<double>(clock::now() - start).count());
  };
  constexpr action_times never{1e30, 1e30, 1e30, 1e30};
  action_times whole = never, alone = never, head = never;  // the embedding with a layer; a layer; the head
  for (int i = 0; i < rounds; ++i) {
    {
      typename model_type::saved kept;
      typename model_type::activation x;
      typename model_type::gradient dy;
      timed(whole.forward, [&] { x = model.forward_layers(mb, ids, {}, &kept); });
      timed(head.forward, [&] { model.forward_loss(mb, std::move(x), labels, &kept); });
      timed(head.input_backward, [&] { dy = model.backward_loss(mb, labels, kept, seed); });
      timed(head.weight_backward, [&] { later.run(); });
      timed(whole.input_backward, [&] { model.backward_layers(mb, ids, kept, std::move(dy)); });
      timed(whole.weight_backward, [&] { later.run(); });
    }
    {
      typename model_type::saved kept;
      typename model_type::activation x(ctx);
      typename model_type::gradient dy(ctx);
      ctx.device.zero(x.data(), static_cast<std::size_t>(x.size()) * sizeof(*x.data()), ctx.device.main_stream());
      ctx.device.zero(dy.data(), static_cast<std::size_t>(dy.size()) * sizeof(*dy.data()), ctx.device.main_stream());
      timed(alone.forward, [&] { x = layer.forward_layers(mb, ids, std::move(x), &kept); });
      timed(alone.input_backward, [&] { dy = layer.backward_layers(mb, ids, kept, std::move(dy)); });
      timed(alone.weight_backward, [&] { later.run(); });
    }
  }
  const auto shared = [&](action_times t) {
    for (double* time : {&t.forward, &t.input_backward, &t.weight_backward})
      *time = all_reduce_scalar(ctx, std::max(*time, 0.0), reduce_op::max);
    t.backward = t.input_backward + t.weight_backward;
    return t;
  };
  const action_times embedding{whole.forward - alone.forward, 0, whole.input_backward - alone.input_backward,
                               whole.weight_backward - alone.weight_backward};
  return {shared(alone), shared(embedding), shared(head)};
}

/// Returns the costs to balance stages by.
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
