// The calls of a step for all parameters of layers or models. What each call means is the parameter's:
// nn/parameter.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/nn/parameter/initial_values.hpp"
#include "plait/nn/parameter/memory_users.hpp"
#include "plait/tensor/check_values.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/parts.hpp"

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
/// Gathers all parameters of layers or models, before a step's first pass. Values of the step before that are to be
/// compared (`value_check`) are compared first. Collective.
template <compute_device Device, class... Layers>
void gather_parameters(const context<Device>& ctx, Layers&... layers) {
  detail::compare_values(ctx);
  each_parameter([&](auto& p) { p.gather(ctx); }, layers...);
}
namespace detail {

template <class Parameter>
std::int64_t elements_without_padding(const Parameter& p) {
  std::int64_t elements = 1;
  for (const std::int64_t n : p.info().shape) elements *= n;
  return elements;
}
/// The part of the parameter `p` that is no padding, which is rows at its end.
template <class Parameter>
box part_without_padding(const Parameter& p) {
  box part = p.part();
  if (elements_without_padding(p) == part.global_size()) return part;
  part.global[0] = p.info().shape[0];
  part.local[0] = std::clamp<std::int64_t>(part.global[0] - part.offset[0], 0, part.local[0]);
  return part;
}

}  // namespace detail

/// Copies this rank's part of the parameter `p` out of the row-major array `whole`, which is without padding, to `out`,
/// whose padding becomes zero: both in the device's memory, in its main stream.
template <class Parameter, class T, compute_device Device>
  requires requires(const Parameter& p) { p.info(); }
void take_part(Device& device, const Parameter& p, const T* whole, T* out) {
  take_part(device, detail::part_without_padding(p), whole, out);
  detail::zero_padding(device, p.info().shape, p.part(), out);
}
/// Copies it back to its place in the whole array, whose other elements stay.
template <class Parameter, class T, compute_device Device>
  requires requires(const Parameter& p) { p.info(); }
void put_part(Device& device, const Parameter& p, const T* in, T* whole) {
  put_part(device, detail::part_without_padding(p), in, whole);
}
/// Sets all parameters of layers or models, and gathers them: `whole`, in the device's memory, has them as whole
/// row-major arrays without padding, one after the other in the order of `visit`, and every rank takes its parts.
/// Returns the elements of the arrays. Collective.
template <compute_device Device, class T, class... Layers>
std::int64_t take_parts(const context<Device>& ctx, const T* whole, Layers&... layers) {
  std::int64_t taken = 0;
  each_parameter(
      [&](auto& p) {
        p.fill_values(ctx, [&](auto* values) { take_part(ctx.device, p, whole + taken, values); });
        p.gather(ctx);
        taken += detail::elements_without_padding(p);
      },
      layers...);
  return taken;
}
/// Begins the gradients of all parameters of layers or models. Throws where two of them share memory of the caller's.
template <compute_device Device, class... Layers>
void zero_gradients(const context<Device>& ctx, Layers&... layers) {
  detail::memory_users users;
  each_parameter(
      [&](auto& p) {
        users.add(p);
        p.zero_gradient(ctx);
      },
      layers...);
}
/// Completes the gradients of all parameters of layers or models, each once, after a step's last pass: for programs
/// with an optimizer of their own, which then read `gradient()` or their own memory. With one of plait's, call `reduce`
/// for each, or let a training_step do it. Throws where two share memory of the caller's. Collective.
template <compute_device Device, class... Layers>
void reduce_all(const context<Device>& ctx, Layers&... layers) {
  detail::memory_users users;
  each_parameter(
      [&](auto& p) {
        users.add(p);
        if (p.trainable()) static_cast<void>(p.reduce(ctx));
      },
      layers...);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
