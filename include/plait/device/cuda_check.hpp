// The check of CUDA's runtime calls, which turns an error into a `plait::error`. It does not see the faults that
// kernels report: those are in device/device_fault.hpp.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// Throws `plait::error` with what was being done, CUDA's name of the error and its text.
inline void cuda_check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // else the next launch would report this error as its own
  fail({"cuda: ", doing, ": ", cudaGetErrorName(status), ": ", cudaGetErrorString(status)});
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
