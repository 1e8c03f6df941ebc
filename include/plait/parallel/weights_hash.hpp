#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plait/nn/parameter.hpp"

namespace plait {

/// A parameter's whole value or gradient, gathered on every rank, in host memory: row-major, with padding. `values` is
/// this rank's part of it, of the parameter's stored layout. Collective over the mesh.
template <class E, class Precision, compute_device Device>
std::vector<E> gather_whole(context<Device>& ctx, const parameter_base<Precision, Device>& p, const E* values) {
  layout whole = p.stored();
  for (dim_placement& d : whole.dims) {
    for (axis_id axis : d.axes) whole.set(axis, state::invariant);
    d.axes = {};
  }
  const executor gather(p.stored(), whole, ctx.ranks, ctx.sizes, "gathering " + p.name());
  auto all = make_buffer<E>(ctx.device, static_cast<std::size_t>(gather.to().local_size()));
  gather.run(ctx.device, values, all.data(), dtype_of<E>);
  std::vector<E> on_host(static_cast<std::size_t>(gather.to().local_size()));
  ctx.device.download(on_host.data(), all.data(), all.bytes(), ctx.device.main_stream());
  return on_host;
}

/// FNV-1a over the bytes of all gathered weights in the order of the model, without padding: equal hashes mean equal
/// weights, on whatever mesh. Collective over the mesh.
template <compute_device Device, class Model>
std::uint64_t weights_hash(context<Device>& ctx, Model& model) {
  std::uint64_t hash = 14695981039346656037ull;
  model.visit([&](auto& p) {
    const auto all = gather_whole(ctx, p, std::as_const(p).value());
    std::size_t count = 1;
    for (std::int64_t n : p.info().shape) count *= static_cast<std::size_t>(n);
    const auto* bytes = reinterpret_cast<const unsigned char*>(all.data());
    for (std::size_t i = 0; i < count * sizeof(all[0]); ++i) hash = (hash ^ bytes[i]) * 1099511628211ull;
  });
  return hash;
}

}  // namespace plait
