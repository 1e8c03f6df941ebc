// Reductions and gathers of a few numbers on the host, between steps. They wait for the device, so that no layer uses
// them, and have no gradient.
#pragma once

#include "plait/comm/any_communicator.hpp"
#include "plait/device/device.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// One number for all of `ranks` from a number that each has on the host: the sum, or the largest or least. It travels
/// through the device's memory and waits for the main stream, so the place to ask is between steps; on one rank nothing
/// is done. Collective.
template <compute_device Device>
double all_reduce_scalar(Device& device, any_communicator& ranks, double value, reduce_op op) {
  if (ranks.size() == 1) return value;
  auto there = make_collective_buffer<double>(device, 1);
  device.upload(there.data(), &value, sizeof value, device.main_stream());
  ranks.all_reduce(there.data(), there.data(), 1, dtype::f64, op);
  device.download(&value, there.data(), sizeof value, device.main_stream());
  return value;
}

/// Reduces over all ranks of the mesh; not counted in the ledger.
template <compute_device Device>
double all_reduce_scalar(const context<Device>& ctx, double value, reduce_op op) {
  return all_reduce_scalar(ctx.device, ctx.ranks.root(), value, op);
}

/// The `count` numbers of every rank, in the order of the ranks; a rank that has fewer adds zeros. The same way.
template <compute_device Device>
std::vector<std::uint64_t> gather_all(Device& device, any_communicator& ranks, std::vector<std::uint64_t> own,
                                      std::size_t count) {
  own.resize(count);
  std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(ranks.size()));
  if (ranks.size() == 1) return own;
  auto there = make_collective_buffer<std::uint64_t>(device, all.size() + own.size());
  auto* const first = there.template data<std::uint64_t>();
  device.upload(first + all.size(), own.data(), own.size() * sizeof(std::uint64_t), device.main_stream());
  ranks.all_gather(first + all.size(), first, own.size(), dtype::i64);
  device.download(all.data(), first, all.size() * sizeof(std::uint64_t), device.main_stream());
  return all;
}

}  // namespace plait
