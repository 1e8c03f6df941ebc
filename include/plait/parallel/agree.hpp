#pragma once

#include "plait/comm/any_communicator.hpp"
#include "plait/device/buffer.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// One number for all of `ranks` from a number that each has on the host: the sum, or the largest or least. It travels
/// through the device's memory and waits for the main stream, so the place to ask is between steps; on one rank nothing
/// is done. Collective.
template <compute_device Device>
double agree(Device& device, any_communicator& ranks, double value, reduce_op op) {
  if (ranks.size() == 1) return value;
  auto there = make_buffer<double>(device, 1);
  device.upload(there.data(), &value, sizeof value, device.main_stream());
  ranks.all_reduce(there.data(), there.data(), 1, dtype::f64, op);
  device.download(&value, there.data(), sizeof value, device.main_stream());
  return value;
}

/// The same for all ranks of the mesh; not counted in the ledger.
template <compute_device Device>
double agree(context<Device>& ctx, double value, reduce_op op) {
  return agree(ctx.device, ctx.ranks.root(), value, op);
}

}  // namespace plait
