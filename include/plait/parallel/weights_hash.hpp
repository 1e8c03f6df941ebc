#pragma once

#include <cstdint>

#include "plait/nn/parameter.hpp"

namespace plait {

/// A parameter's whole value, gathered on every rank, row-major, with padding. Collective over the mesh.
template <class T, compute_device Device>
buffer<Device> gather_whole(context<Device>& ctx, parameter_base<T, Device>& p, T* values) {
  layout whole = p.stored();
  for (dim_placement& d : whole.dims) {
    for (axis_id axis : d.axes) whole.set(axis, state::invariant);
    d.axes = {};
  }
  const executor gather(p.stored(), whole, ctx.ranks, ctx.sizes, "gathering " + p.name());
  auto all = make_buffer<T>(ctx.device, static_cast<std::size_t>(gather.to().local_size()));
  gather.run(ctx.device, values, all.data(), dtype_of<T>);
  return all;
}

/// FNV-1a over the bytes of all gathered weights in the order of the model, without padding: equal hashes mean equal
/// weights, on whatever mesh. Collective over the mesh.
template <compute_device Device, class Model>
std::uint64_t weights_hash(context<Device>& ctx, Model& model) {
  std::uint64_t hash = 14695981039346656037ull;
  model.visit([&](auto& p) {
    const auto all = gather_whole(ctx, p, p.value());
    std::size_t count = 1;
    for (std::int64_t n : p.info().shape) count *= static_cast<std::size_t>(n);
    const auto* bytes = all.template data<unsigned char>();
    for (std::size_t i = 0; i < count * sizeof(*p.value()); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  });
  return hash;
}

}  // namespace plait
