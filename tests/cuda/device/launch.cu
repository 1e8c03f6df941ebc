#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"

namespace {

using plait::cuda;
namespace detail = plait::detail;

template <class T>
__global__ void add(const T* x, const T* y, T* sum, std::int64_t n) {
  const std::int64_t stride = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) sum[i] = x[i] + y[i];
}

// Reverses the elements of each block. Elements of other threads are readable only after the barrier.
__global__ void reverse_blocks(const int* x, int* y) {
  PLAIT_DYNAMIC_SHARED(int, tile);
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  tile[threadIdx.x] = x[i];
  __syncthreads();
  y[i] = tile[blockDim.x - 1 - threadIdx.x];
}

template <class T>
T* uploaded(cuda& device, const std::vector<T>& values) {
  auto* p = static_cast<T*>(device.allocate(values.size() * sizeof(T)));
  device.upload(p, values.data(), values.size() * sizeof(T), device.main_stream());
  return p;
}
template <class T>
std::vector<T> downloaded(cuda& device, const T* p, std::size_t n) {
  std::vector<T> values(n);
  device.download(values.data(), p, n * sizeof(T), device.main_stream());
  return values;
}

}  // namespace

TEST_CASE_TEMPLATE("launch: a vector sum, with and without more elements than threads", T, float, double, int) {
  cuda device;
  for (const std::size_t n : {std::size_t{1}, std::size_t{255}, std::size_t{4099}}) {
    std::vector<T> x(n), y(n);
    for (std::size_t i = 0; i < n; ++i) {
      x[i] = static_cast<T>(i);
      y[i] = static_cast<T>(3 * i + 1);
    }
    T *a = uploaded(device, x), *b = uploaded(device, y);
    const auto count = static_cast<std::int64_t>(n);
    detail::launch(device, {dim3(detail::blocks_for(count, 128, 4)), dim3(128), 0}, add<T>, a, b, a, count);
    const std::vector<T> sum = downloaded(device, a, n);
    int wrong = 0;
    for (std::size_t i = 0; i < n; ++i) wrong += sum[i] != x[i] + y[i];
    CHECK(wrong == 0);
    device.release(a);
    device.release(b);
  }
}

TEST_CASE("launch: dynamic shared memory, also beyond 48 KB") {
  cuda device;
  std::vector<int> x(4 * 512);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int>(i);
  int *a = uploaded(device, x), *b = uploaded(device, x);
  for (const std::size_t bytes :
       {std::size_t{2048}, std::min(std::size_t{100} << 10, device.shared_bytes_per_block())}) {
    detail::allow_shared(reverse_blocks, bytes);
    detail::launch(device, {dim3(4), dim3(512), bytes}, reverse_blocks, a, b);
    const std::vector<int> y = downloaded(device, b, x.size());
    int wrong = 0;
    for (std::size_t i = 0; i < x.size(); ++i) wrong += y[i] != x[i / 512 * 512 + 511 - i % 512];
    CHECK(wrong == 0);
  }
  device.release(a);
  device.release(b);
}

TEST_CASE("launch: a refused launch throws, and the device can be used after it") {
  cuda device;
  int* a = uploaded(device, std::vector<int>(2048));
  CHECK_THROWS_WITH_AS(detail::launch(device, {dim3(1), dim3(2048), 0}, reverse_blocks, a, a),
                       doctest::Contains("cuda: launching a kernel: cudaError"), plait::error);
  CHECK_THROWS_WITH_AS(detail::launch(device, {dim3(1), dim3(64), std::size_t{300} << 10}, reverse_blocks, a, a),
                       doctest::Contains("cuda: launching a kernel: cudaError"), plait::error);
  detail::launch(device, {dim3(1), dim3(512), 2048}, reverse_blocks, a, a);
  device.synchronize();
  device.release(a);
}
