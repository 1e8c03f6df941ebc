// Pinned memory of the host: what lies there for long, which a GPU's kernels read and write at the address that the
// host uses (cuda::options::offload_optimizer), and what a save copies to. What passes through on its way to a GPU goes
// by device/cuda.hpp. Tests: tests/cuda/offload.cpp, tests/cuda/checkpoint_staging.cpp.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_check.hpp"
#include "plait/io/byte_buffer.hpp"

namespace plait::detail {

/// Returns memory of `cudaHostAlloc`, which every GPU of the process can reach. Throws `error` that names `what_for`
/// and says what to do, where the host has no room.
inline void* allocate_pinned(std::size_t bytes, std::string_view what_for, std::string_view what_to_do) {
  void* pointer = nullptr;
  const cudaError_t status = cudaHostAlloc(&pointer, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  if (status == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    fail({"cuda: ", what_for, ": the host has no room for ", bytes, " bytes of pinned memory; ", what_to_do,
          ", or allow the process more memory that is locked"});
  }
  cuda_check(status, "allocating pinned memory");
  return pointer;
}

/// Pinned memory under device/allocator.hpp. What is released to it must not be in use by a kernel any more.
struct pinned_memory {
  void* allocate(std::size_t bytes, std::uintptr_t) const {
    return allocate_pinned(bytes, "options::offload_optimizer",
                           "offload on fewer ranks of a machine, cut the optimizer's state over more ranks "
                           "(zero_level::optimizer)");
  }
  void release(void* pointer, std::size_t, std::uintptr_t) const noexcept { cudaFreeHost(pointer); }
};

/// Pinned memory that saves copy to, of no device object.
struct pinned_staging {
  static std::byte* allocate(std::size_t bytes) {
    return static_cast<std::byte*>(allocate_pinned(
        bytes, "saver_options::pinned_bytes",
        "set it to 0, so that saves are staged in pageable memory and wait longer, save on more ranks"));
  }
  static void release(std::byte* memory) { cudaFreeHost(memory); }
  /// Functions with names, because what nvcc makes of lambdas as pointers g++ does not compile.
  static host_memory functions() { return {allocate, release}; }
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
