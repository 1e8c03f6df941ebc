// The sort that kernels/cuda/launchers.hpp declares for gradients of embeddings. It is the only file that includes CUB,
// and a part of plait::compiled_cuda. Programs that compile the other kernels from headers must compile this file too.
#include <cstddef>
#include <cub/device/device_radix_sort.cuh>

#include "plait/device/cuda_launch.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/cuda/launchers.hpp"

namespace plait::kernels::detail {

void sort_pairs(cuda& device, key_values& pairs, int count, int bits) {
  const int now = pairs.now, other = 1 - now;
  cub::DoubleBuffer<std::uint32_t> keys(pairs.keys[now], pairs.keys[other]);
  cub::DoubleBuffer<int> values(pairs.values[now], pairs.values[other]);
  std::size_t bytes = 0;
  const auto sort = [&](void* scratch) {
    plait::detail::cuda_check(
        cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, values, count, 0, bits, device.main_stream().handle()),
        "sorting");
  };
  sort(nullptr);  // computes the needed bytes
  buffer<cuda> scratch(device, bytes);
  sort(scratch.data());
  if (keys.Current() != pairs.keys[now]) pairs.now = other;
}

}  // namespace plait::kernels::detail
