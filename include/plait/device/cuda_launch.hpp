// The launch of CUDA kernels: grids, errors as exceptions, and dynamic shared memory, which kernels declare by
// PLAIT_DYNAMIC_SHARED. Helpers for the inside of kernels are in kernels/cuda/math.hpp. Test: tests/cuda/launch.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "plait/device/cuda_check.hpp"

/// The block's dynamic shared memory as an array of T, aligned to 16 bytes. All kernels share one name for it, because
/// `extern` arrays of one name must have one type.
#ifdef PLAIT_CUDA_STAND_IN
#define PLAIT_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(__stand_in_dynamic_shared())
#else
#define PLAIT_DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char plait_dynamic_shared[]; \
  T* const name = reinterpret_cast<T*>(plait_dynamic_shared)
#endif

namespace plait::detail {

struct launch_shape {
  dim3 grid = dim3(1);
  dim3 block = dim3(1);
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of a block
};

/// Blocks of `per_block` that cover n things; at least 1, at most what a grid's first dimension takes. Kernels stride
/// over what a capped grid leaves.
inline unsigned blocks_for(std::int64_t n, std::int64_t per_block, std::int64_t most = 0x7fffffff) {
  const std::int64_t blocks = (n + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > most ? most : blocks);
}

/// Puts a kernel into a stream. Throws `plait::error` where the launch is refused; what goes wrong while it runs is met
/// at the next synchronisation.
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, const launch_shape& shape, void (*kernel)(Parameters...), Arguments... arguments) {
  static_assert(sizeof...(Parameters) == sizeof...(Arguments));
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launching a kernel");
}
template <class Device, class... Parameters, class... Arguments>
  requires requires(const Device& d) { d.main_stream().handle(); }
void launch(const Device& device, const launch_shape& shape, void (*kernel)(Parameters...), Arguments... arguments) {
  launch(device.main_stream().handle(), shape, kernel, arguments...);
}

/// Lets a kernel use `bytes` of dynamic shared memory where that is more than the 48 KB that need no leave.
template <class... Parameters>
void allow_shared(void (*kernel)(Parameters...), std::size_t bytes) {
  if (bytes <= 48 * 1024) return;
  cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "asking for shared memory");
}

}  // namespace plait::detail
