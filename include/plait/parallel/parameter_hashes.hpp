// Hashes of a model's parameters, one each and one in total. They do not depend on the mesh, so two runs can be
// compared.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/host_values.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/parallel/step_result.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait {

/// Gathers a parameter's whole value or gradient on every rank, in host memory: row-major, with padding. `values` is
/// this rank's slice of its part in the parameter's stored layout. Collective over the mesh.
template <class E, class Precision, compute_device Device>
std::vector<E> gather_whole(const context<Device>& ctx, const parameter<Precision, Device>& p, const E* values) {
  layout whole = p.stored();
  for (const dim_placement& d : p.stored().dims)
    for (axis_id axis : d.axes) whole.set(axis, state::invariant);
  const ready_plan gather(p.stored(), whole, ctx.ranks, p.sizes(), "gathering " + p.name());
  buffer<Device> part;
  if (auto* const storage = p.storage(); storage && !storage->axes().empty()) {
    part = make_buffer<E>(ctx.device, static_cast<std::size_t>(p.size()));
    const storage_slice own = p.slice();
    E* const to = part.template data<E>();
    ctx.device.copy(to + own.begin, values, static_cast<std::size_t>(own.size()) * sizeof(E), ctx.device.main_stream());
    for (int rank = 0; rank < storage->group().size(); ++rank)
      if (const storage_slice theirs = p.slice_of(rank); theirs.size() > 0)
        storage->group().broadcast(to + theirs.begin, static_cast<std::size_t>(theirs.size()), dtype_of<E>, rank);
    values = to;
  }
  auto all = make_buffer<E>(ctx.device, static_cast<std::size_t>(gather.target().local_size()));
  gather.run(ctx.device, values, all.data(), dtype_of<E>);
  std::vector<E> on_host(static_cast<std::size_t>(gather.target().local_size()));
  ctx.device.download(on_host.data(), all.data(), all.bytes(), ctx.device.main_stream());
  return on_host;
}

namespace detail {

/// Returns the hash of a whole parameter's values or gradient; `local` is this rank's slice.
/// Collective.
template <class E, class Precision, compute_device Device>
std::uint64_t hash_of_whole(const context<Device>& ctx, const parameter<Precision, Device>& p, const E* local) {
  const std::vector<E> all = gather_whole(ctx, p, local);
  std::size_t count = 1;
  for (const std::int64_t n : p.info().shape) count *= static_cast<std::size_t>(n);
  const std::string_view bytes(reinterpret_cast<const char*>(all.data()), count * sizeof(E));
  return fnv1a(bytes, fnv1a(p.name()));
}

/// A parameter's hashes without its name, in the form that ranks send.
struct sent_hashes {
  std::uint64_t value, gradient;
  std::uint64_t has_gradient;
  std::uint64_t name_length;
  std::int64_t stage;
};

/// Returns the hashes of all ranks of a pipeline, by stage. `chunks` are the hashes of this rank's stages. Collective.
template <compute_device Device, class Pipeline>
std::vector<parameter_hash> hashes_of_stages(const context<Device>& ctx, Pipeline& model,
                                             const std::vector<std::vector<parameter_hash>>& chunks) {
  any_communicator& along = model.executor().along();
  std::vector<sent_hashes> own;
  std::vector<char> own_names;
  for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk)
    for (const parameter_hash& h : chunks[chunk]) {
      own.push_back({h.value, h.gradient.value_or(0), h.gradient.has_value(), h.name.size(),
                     model.shape().stage_of(along.rank(), static_cast<int>(chunk))});
      own_names.insert(own_names.end(), h.name.begin(), h.name.end());
    }
  const auto all = gather_records(ctx.device, along, own);
  const auto names = gather_records(ctx.device, along, own_names);
  std::vector<std::pair<std::int64_t, parameter_hash>> by_stage;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::string_view rest(names[rank].data(), names[rank].size());
    for (const sent_hashes& h : all[rank]) {
      parameter_hash& to = by_stage.emplace_back(h.stage, parameter_hash{}).second;
      to.name = rest.substr(0, h.name_length);
      to.value = h.value;
      if (h.has_gradient != 0) to.gradient = h.gradient;
      rest.remove_prefix(h.name_length);
    }
  }
  std::stable_sort(by_stage.begin(), by_stage.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<parameter_hash> out;
  for (auto& [stage, hash] : by_stage) out.push_back(std::move(hash));
  return out;
}

}  // namespace detail

/// Returns the hashes of each parameter in the order of the forward pass, equal on every rank. They do not depend on
/// the mesh, on data parallelism, or on the stages that hold parameters. A parameter that several layers or stages
/// share counts once. `gradients` includes hashes of the last step's reduced gradients before clipping; then there must
/// have been a step. Collective over the mesh and the pipeline's stages. It gathers one parameter at a time; call it
/// between steps.
template <compute_device Device, class Model>
std::vector<parameter_hash> parameter_hashes(const context<Device>& ctx, Model& model, bool gradients = false) {
  std::vector<parameter_hash> here;
  const auto add = [&](auto& p) {
    const auto& read = std::as_const(p);
    parameter_hash hash{p.name(), detail::hash_of_whole(ctx, read, read.value())};
    if (gradients && p.trainable()) hash.gradient = detail::hash_of_whole(ctx, read, read.gradient());
    here.push_back(std::move(hash));
  };
  if constexpr (!requires { model.executor(); }) {
    model.visit(add);
    return here;
  } else {
    std::vector<std::vector<parameter_hash>> chunks;
    for (int chunk = 0; chunk < model.shape().chunks; ++chunk) {
      model.visit_chunk(chunk, [&](auto& p) {
        if (p.counts()) add(p);
      });
      chunks.push_back(std::exchange(here, {}));
    }
    return detail::hashes_of_stages(ctx, model, chunks);
  }
}

/// Returns the hash of all weights: the sum of their hashes, each folded to its lower half.
inline std::uint64_t weights_hash(const std::vector<parameter_hash>& all) {
  std::uint64_t sum = 0;
  for (const parameter_hash& p : all) sum += p.value ^ (p.value >> 32);
  return sum;
}

/// Returns a hash of all weights without padding. Equal hashes mean equal weights, on any mesh and for any placement of
/// layers. Collective over the mesh and the pipeline's stages.
template <compute_device Device, class Model>
std::uint64_t weights_hash(const context<Device>& ctx, Model& model) {
  return weights_hash(parameter_hashes(ctx, model));
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
