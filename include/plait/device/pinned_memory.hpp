// Pinned memory of the host as a source of memory under device/allocator.hpp: a GPU's kernels read and write it at the
// address that the host uses. It holds what lies there for long; what passes through goes by device/upload_ring.hpp.
// Next: device/cuda.hpp, whose options::offload_optimizer uses it. Test: tests/cuda/offload.cpp.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_check.hpp"

namespace plait::detail {

/// Memory of `cudaHostAlloc`, which every GPU of the process can reach. What is released to it must not be in use by a
/// kernel any more.
struct pinned_memory {
  void* allocate(std::size_t bytes, std::uintptr_t) const {
    void* pointer = nullptr;
    const cudaError_t status = cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (status == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      fail({"cuda: options::offload_optimizer: the host has no room for ", bytes,
            " bytes of pinned memory; offload on fewer ranks of a machine, cut the optimizer's state over more ranks "
            "(zero_level::optimizer), or allow the process more memory that is locked"});
    }
    cuda_check(status, "allocating pinned memory for an optimizer");
    return pointer;
  }
  void release(void* pointer, std::size_t, std::uintptr_t) const noexcept { cudaFreeHost(pointer); }
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
