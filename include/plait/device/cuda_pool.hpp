// The source of a GPU's memory under device/allocator.hpp, and the text of an out-of-memory error. Each device object
// has its own; it is not CUDA's default pool, which the caller's code may use. Next: device/cuda.hpp.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/device/cuda_check.hpp"

namespace plait::detail {

/// Where a CUDA device's caching allocator gets its memory: a private stream-ordered pool, which keeps what is released
/// to it. Blocks are asked for and given back in the order of their stream.
class cuda_pool {
 public:
  explicit cuda_pool(int device, const std::vector<int>& peers = {}) : device_(device) {
    cudaMemPoolProps wanted{};
    wanted.allocType = cudaMemAllocationTypePinned;  // CUDA's word for memory that stays on its device
    wanted.location.type = cudaMemLocationTypeDevice;
    wanted.location.id = device;
    cuda_check(cudaMemPoolCreate(&pool_, &wanted), "making a memory pool");
    std::uint64_t keep_all = ~std::uint64_t{0};
    cuda_check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all), "setting up a memory pool");
    open_to(peers);
  }
  cuda_pool(const cuda_pool&) = delete;
  cuda_pool& operator=(const cuda_pool&) = delete;
  ~cuda_pool() { cudaMemPoolDestroy(pool_); }

  /// Gives other GPUs of the process access, where the machine connects them. Where it does not, NCCL copies by way of
  /// the host.
  void open_to(const std::vector<int>& peers) {
    for (const int peer : peers) {
      int connected = 0;
      if (peer == device_) continue;
      cuda_check(cudaDeviceCanAccessPeer(&connected, peer, device_), "asking whether GPUs are connected");
      if (connected == 0) continue;
      cudaMemAccessDesc access{};
      access.location.type = cudaMemLocationTypeDevice;
      access.location.id = peer;
      access.flags = cudaMemAccessFlagsProtReadWrite;
      cuda_check(cudaMemPoolSetAccess(pool_, &access, 1), "giving a GPU access to a memory pool");
    }
  }

  /// Null where memory is exhausted.
  void* try_allocate(std::size_t bytes, std::uintptr_t stream) {
    const auto s = reinterpret_cast<cudaStream_t>(stream);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(s, &capture), "asking for a capture");
    if (capture != cudaStreamCaptureStatusNone) {
      fail({"cuda: a captured step asks for ", bytes,
            " bytes that the steps before it did not need; run the same step twice before it is captured"});
    }
    void* pointer = nullptr;
    const cudaError_t status = cudaMallocFromPoolAsync(&pointer, bytes, pool_, s);
    if (status == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      return nullptr;
    }
    cuda_check(status, "allocating");
    held_ += bytes;
    return pointer;
  }
  void* allocate(std::size_t bytes, std::uintptr_t stream) {
    void* const pointer = try_allocate(bytes, stream);
    if (pointer == nullptr) fail(exhausted(bytes));
    return pointer;
  }
  void release(void* pointer, std::size_t bytes, std::uintptr_t stream) noexcept {
    cudaFreeAsync(pointer, reinterpret_cast<cudaStream_t>(stream));
    held_ -= bytes;
  }

  /// Gives what has been released back to the driver, once the streams have come so far.
  void trim() { cuda_check(cudaMemPoolTrimTo(pool_, 0), "giving memory back"); }

  std::size_t expected = 0;  ///< what the plan says, for the text of the error

 private:
  std::string exhausted(std::size_t bytes) const {
    std::size_t free = 0, total = 0;
    static_cast<void>(cudaMemGetInfo(&free, &total));
    std::string text =
        cat({"cuda: out of memory on device ", device_, ": ", bytes, " bytes were asked for; this rank holds ", held_,
             ", the device has ", free, " free of ", total});
    if (expected != 0) append(text, {"; the plan for a rank is ", expected});
    return text + ". Use a smaller microbatch, more recomputation, or more ranks";
  }

  int device_;
  cudaMemPool_t pool_ = nullptr;
  std::size_t held_ = 0;
};

}  // namespace plait::detail
