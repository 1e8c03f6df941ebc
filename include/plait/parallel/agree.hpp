#pragma once

#include "plait/device/buffer.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// One number for all ranks of the mesh from a number that each has on the host: the sum, or the largest or least. It
/// travels through the device's memory and waits for the main stream, so the place to ask is between steps; on one rank
/// nothing is done. Collective; not counted in the ledger.
template <compute_device Device>
double agree(context<Device>& ctx, double value, reduce_op op) {
  if (ctx.ranks.size() == 1) return value;
  auto there = make_buffer<double>(ctx.device, 1);
  ctx.device.upload(there.data(), &value, sizeof value, ctx.device.main_stream());
  ctx.ranks.root().all_reduce(there.data(), there.data(), 1, dtype::f64, op);
  ctx.device.download(&value, there.data(), sizeof value, ctx.device.main_stream());
  return value;
}

}  // namespace plait
