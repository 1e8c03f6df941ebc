// The sort of kernels/cuda/launchers.hpp, which the gradients of embeddings need. No other file includes CUB. It is
// part of plait::compiled_cuda; programs that compile the other kernels by their headers also compile this file.
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
  sort(nullptr);  // asks for the bytes
  buffer<cuda> scratch(device, bytes);
  sort(scratch.data());
  if (keys.Current() != pairs.keys[now]) pairs.now = other;
}

}  // namespace plait::kernels::detail
