// The report of a fault from inside a kernel. It ends nothing: the kernel goes on, and `synchronize` of device/cuda.hpp
// throws later.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "plait/device/device_fault.hpp"

namespace plait::kernels::detail {

/// Writes down what a kernel cannot throw; the first fault since the last synchronisation is kept. `cuda::synchronize`
/// throws it.
__device__ inline void report_fault(device_fault* faults, int code, std::int64_t row, std::int64_t value,
                                    std::int64_t limit) {
  if (atomicCAS(&faults->code, device_fault::none, code) != device_fault::none) return;
  faults->row = static_cast<int>(row);
  faults->value = value;
  faults->limit = limit;
}

}  // namespace plait::kernels::detail
