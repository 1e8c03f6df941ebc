// The memory that linears keep between their passes, and whether a device adds within a product.
#pragma once

#include <cstdint>

#include "plait/device/buffer.hpp"
#include "plait/nn/layer/saved_stamp.hpp"

namespace plait {

/// The memory that linears keep of a forward pass beyond their input: the gathered input, unless it is the input
/// itself, or is to be gathered again, or no weight needs it; what adapters have between their two weights.
template <compute_device Device>
struct linear_saved {
  buffer<Device> gathered, adapted;
  detail::saved_stamp stamp{};
};

namespace detail {

/// Whether a product on the device can add a row to each row of its result, and a matrix, in the same pass.
template <class Device, class T>
concept fuses_additions = requires(Device& d, std::int64_t n, const T* in, T* out) {
  d.gemm(false, true, n, n, n, 1.0, in, n, in, n, 0.0, out, n, {in, in});
};

}  // namespace detail

}  // namespace plait
