// The whole value of a parameter on the host, and a hash of all weights that does not depend on the mesh, for tests
// and logs. It is no checkpoint: checkpoint/safetensors_writer.hpp. Next: testing/trained_values.hpp.
#pragma once

#include <cstdint>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/hash.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/train/train_step.hpp"

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

/// A hash of all weights, without padding: equal hashes mean equal weights, on whatever mesh and however the layers are
/// shared out. Each parameter's name and value are hashed (FNV-1a), and the sum of their hashes is the model's.
/// Collective over the mesh, and over the stages of a pipeline.
template <compute_device Device, class Model>
std::uint64_t weights_hash(const context<Device>& ctx, Model& model) {
  std::uint64_t sum = 0;
  const auto add = [&](auto& p) {
    const auto all = gather_whole(ctx, p, std::as_const(p).value());
    std::size_t count = 1;
    for (std::int64_t n : p.info().shape) count *= static_cast<std::size_t>(n);
    const std::string_view bytes(reinterpret_cast<const char*>(all.data()), count * sizeof(all[0]));
    const std::uint64_t hash = fnv1a(bytes, fnv1a(p.name()));
    sum += hash ^ (hash >> 32);
  };
  if constexpr (!requires { model.executor(); }) {
    model.visit(add);
  } else {
    model.visit_once(add);
    any_communicator& along = model.executor().along();
    std::vector<std::uint64_t> parts(static_cast<std::size_t>(along.size()), sum);
    if (along.size() > 1) {
      auto there = make_buffer<std::uint64_t>(ctx.device, parts.size() + 1);
      auto* const own = there.template data<std::uint64_t>() + parts.size();
      ctx.device.upload(own, &sum, sizeof sum, ctx.device.main_stream());
      along.all_gather(own, there.data(), 1, dtype::i64);
      ctx.device.download(parts.data(), there.data(), parts.size() * sizeof sum, ctx.device.main_stream());
    }
    sum = std::accumulate(parts.begin(), parts.end(), std::uint64_t{0});
  }
  return sum;
}

}  // namespace plait
