// The calls of a step for all parameters of layers or models. What each call means is the parameter's:
// nn/parameter.hpp. Next: train/train_step.hpp, which makes these calls itself.
#pragma once

#include <algorithm>
#include <vector>

#include "plait/tensor/context.hpp"

namespace plait {

/// Calls f with each parameter of the layers or models, in their order; with one that several have, as a tied table,
/// once.
template <class F, class... Layers>
void each_parameter(F&& f, Layers&... layers) {
  std::vector<const void*> met;
  const auto first_time = [&](auto& p) {
    if (std::find(met.begin(), met.end(), &p) != met.end()) return;
    met.push_back(&p);
    f(p);
  };
  (layers.visit(first_time), ...);
}
/// Gathers all parameters of layers or models, before a step's first pass. Collective.
template <compute_device Device, class... Layers>
void gather_parameters(const context<Device>& ctx, Layers&... layers) {
  each_parameter([&](auto& p) { p.gather(ctx); }, layers...);
}
/// Begins the gradients of all parameters of layers or models.
template <compute_device Device, class... Layers>
void zero_gradients(const context<Device>& ctx, Layers&... layers) {
  each_parameter([&](auto& p) { p.zero_gradient(ctx); }, layers...);
}
/// Completes the gradients of all parameters of layers or models, each once, after a step's last pass: for programs
/// with an optimizer of their own, which then read `gradient()` or their own memory. With one of plait's, call `reduce`
/// for each, or let a training_step do it. Collective.
template <compute_device Device, class... Layers>
void reduce_all(const context<Device>& ctx, Layers&... layers) {
  each_parameter(
      [&](auto& p) {
        if (p.trainable()) static_cast<void>(p.reduce(ctx));
      },
      layers...);
}

}  // namespace plait
