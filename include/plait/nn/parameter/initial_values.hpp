// The values with which a parameter begins, on this rank's part of it, and the zeros of its padding. Whose values they
// are, and when they may change, is nn/parameter.hpp's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/core/box.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/nn/parameter/info.hpp"
#include "plait/tensor/context.hpp"

namespace plait::detail {

/// Fills `values`, of the size of `part`, with the mean or with normal numbers as `info` says: number `stream` of the
/// random streams of the context's seed, keyed by the global index.
template <class T, compute_device Device>
void fill_initial(const context<Device>& ctx, const parameter_info& info, const box& part, std::uint64_t stream,
                  T* values) {
  if (info.init.std == 0)
    kernels::fill(ctx.device, values, part.local_size(), converted<T>(info.init.mean));
  else
    kernels::fill_normal(ctx.device, values, part, ctx.seed, stream, info.init.mean, info.init.std);
}

/// Zeroes the rows of `values`, of the size of `part`, that lie beyond the leading extent of the logical `shape`.
template <class T, compute_device Device>
void zero_padding(Device& device, const std::vector<std::int64_t>& shape, const box& part, T* values) {
  std::int64_t logical = 1, padded = 1;
  for (std::int64_t n : shape) logical *= n;
  for (int d = 0; d < part.dims; ++d) padded *= part.global[static_cast<std::size_t>(d)];
  if (logical == padded) return;
  const std::int64_t row = part.local_size() / part.local[0];
  const std::int64_t first = std::max<std::int64_t>(0, shape[0] - part.offset[0]);
  if (first < part.local[0])
    device.zero(values + first * row, static_cast<std::size_t>((part.local[0] - first) * row) * sizeof(T),
                device.main_stream());
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
