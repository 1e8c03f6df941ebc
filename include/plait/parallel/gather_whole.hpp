// The whole value or gradient of a parameter on the host, for tests and reports.
#pragma once

#include <cstddef>
#include <vector>

#include "plait/nn/parameter.hpp"
#include "plait/tensor/executor.hpp"

namespace plait {

/// A parameter's whole value or gradient, gathered on every rank, in host memory: row-major, with padding. `values` is
/// this rank's piece of its part, which is of the parameter's stored layout. Collective over the mesh.
template <class E, class Precision, compute_device Device>
std::vector<E> gather_whole(const context<Device>& ctx, const parameter<Precision, Device>& p, const E* values) {
  layout whole = p.stored();
  for (dim_placement& d : whole.dims) {
    for (axis_id axis : d.axes) whole.set(axis, state::invariant);
    d.axes = {};
  }
  const executor gather(p.stored(), whole, ctx.ranks, p.sizes(), "gathering " + p.name());
  buffer<Device> part;
  if (auto* const home = p.home(); home && !home->axes().empty()) {
    part = make_buffer<E>(ctx.device, static_cast<std::size_t>(p.size()));
    const parameter_piece own = p.piece();
    E* const to = part.template data<E>();
    ctx.device.copy(to + own.begin, values, static_cast<std::size_t>(own.size()) * sizeof(E), ctx.device.main_stream());
    for (int rank = 0; rank < home->group().size(); ++rank)
      if (const parameter_piece theirs = p.piece_of(rank); theirs.size() > 0)
        home->group().broadcast(to + theirs.begin, static_cast<std::size_t>(theirs.size()), dtype_of<E>, rank);
    values = to;
  }
  auto all = make_buffer<E>(ctx.device, static_cast<std::size_t>(gather.target().local_size()));
  gather.run(ctx.device, values, all.data(), dtype_of<E>);
  std::vector<E> on_host(static_cast<std::size_t>(gather.target().local_size()));
  ctx.device.download(on_host.data(), all.data(), all.bytes(), ctx.device.main_stream());
  return on_host;
}

}  // namespace plait
