// Arrays on the stand-in's device, and launches of kernels there.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "stand_in/cuda/cuda_runtime.h"

namespace plait::test {

template <class... Parameters, class... Arguments>
cudaError_t launch(dim3 grid, dim3 block, std::size_t shared, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}
/// One thread.
template <class... Parameters, class... Arguments>
cudaError_t launch(cudaStream_t stream, void (*kernel)(Parameters...), Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class T>
T* on_device(const std::vector<T>& values) {
  T* p = nullptr;
  REQUIRE(cudaMalloc(&p, values.size() * sizeof(T)) == cudaSuccess);
  REQUIRE(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  return p;
}
template <class T>
std::vector<T> on_host(const T* p, std::size_t n) {
  std::vector<T> values(n);
  REQUIRE(cudaMemcpy(values.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
  return values;
}

}  // namespace plait::test
