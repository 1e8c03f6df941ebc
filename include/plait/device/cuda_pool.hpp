// The source of a GPU's memory under device/allocator.hpp, and the text of an out-of-memory error. Each device object
// has its own; it is not CUDA's default pool, which the caller's code may use.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_check.hpp"
#include "plait/device/memory_functions.hpp"
#include "plait/device/registered_memory.hpp"
#include "plait/device/relaxed_capture.hpp"

namespace plait::detail {

/// Where a CUDA device's caching allocator gets its memory: a private stream-ordered pool, which keeps what is released
/// to it, or the program's allocator. Blocks are asked for and given back in the order of their stream.
class cuda_pool {
 public:
  explicit cuda_pool(int device, const std::vector<int>& peers = {}, memory_functions<cudaStream_t> programs = {})
      : device_(device), programs_(std::move(programs)) {
    programs_.require_both("cuda");
    if (programs_) return;
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
  ~cuda_pool() {
    if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
  }

  /// Gives other GPUs of the process access, where the machine connects them. Where it does not, NCCL copies by way of
  /// the host. To the memory of the program's allocator, the program gives it.
  void open_to(const std::vector<int>& peers) {
    if (programs_) return;
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

  /// Serves what collectives read and write, blocks of `key_for_collectives`, from `memory`.
  void serve_collectives(registered_memory memory) {
    if (registered_) fail({"cuda: device ", device_, " has memory for collectives already: its ", memory.option});
    registered_ = registered_blocks(std::move(memory));
  }
  const registered_memory& served_to_collectives() const { return registered_.memory(); }
  std::uintptr_t key_for_collectives(std::uintptr_t stream) const {
    return registered_ ? stream | registered_key : stream;
  }
  /// The key under which a released block is kept.
  std::uintptr_t key_of(const void* pointer, std::uintptr_t stream) const {
    return registered_.holds(pointer) ? stream | registered_key : stream;
  }

  /// Null where memory is exhausted.
  void* try_allocate(std::size_t bytes, std::uintptr_t stream) {
    if ((stream & registered_key) != 0) return try_allocate_registered(bytes, stream);
    const auto s = reinterpret_cast<cudaStream_t>(stream);
    refuse_while_captured(bytes, s);
    void* const pointer = programs_ ? programs_.allocate_aligned(boundary, "cuda", bytes, s) : from_pool(bytes, s);
    if (pointer != nullptr) held_ += bytes;
    return pointer;
  }
  void* allocate(std::size_t bytes, std::uintptr_t stream) {
    void* const pointer = try_allocate(bytes, stream);
    if (pointer == nullptr) fail((stream & registered_key) != 0 ? registered_.exhausted(bytes) : exhausted(bytes));
    return pointer;
  }
  void release(void* pointer, std::size_t bytes, std::uintptr_t stream) noexcept {
    if (registered_.holds(pointer)) return registered_.release(pointer, bytes);
    const auto s = reinterpret_cast<cudaStream_t>(stream);
    held_ -= bytes;
    if (programs_) return programs_.release(pointer, bytes, s);
    cudaFreeAsync(pointer, s);
  }

  /// Waits until what has been released in these streams is free, and gives it back to the driver: a large block may
  /// need the memory of several that are.
  void await_releases(const std::vector<std::uintptr_t>& streams) {
    const relaxed_capture relaxed;
    for (const std::uintptr_t key : streams) {
      const auto stream = reinterpret_cast<cudaStream_t>(key & ~registered_key);
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      cuda_check(cudaStreamIsCapturing(stream, &capture), "asking for a capture");
      if (capture == cudaStreamCaptureStatusNone) cuda_check(cudaStreamSynchronize(stream), "waiting for a stream");
    }
    trim();
  }

  /// Gives what has been released back to the driver, once the streams have come so far.
  void trim() {
    if (pool_ != nullptr) cuda_check(cudaMemPoolTrimTo(pool_, 0), "giving memory back");
  }

  std::size_t expected = 0;  ///< what the plan says, for the text of the error

 private:
  /// Marks, in a stream's key, blocks of registered memory: no address has this bit.
  static constexpr std::uintptr_t registered_key = std::uintptr_t{1} << 63;

  static constexpr std::size_t boundary = 256;

  void* from_pool(std::size_t bytes, cudaStream_t stream) {
    void* pointer = nullptr;
    const cudaError_t status = cudaMallocFromPoolAsync(&pointer, bytes, pool_, stream);
    if (status == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      return nullptr;
    }
    cuda_check(status, "allocating");
    return pointer;
  }
  void* try_allocate_registered(std::size_t bytes, std::uintptr_t stream) {
    void* const pointer = registered_.try_allocate(bytes);
    if (pointer == nullptr) refuse_while_captured(bytes, reinterpret_cast<cudaStream_t>(stream & ~registered_key));
    return pointer;
  }
  static void refuse_while_captured(std::size_t bytes, cudaStream_t stream) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(stream, &capture), "asking for a capture");
    if (capture == cudaStreamCaptureStatusNone) return;
    fail({"cuda: a captured step asks for ", bytes,
          " bytes that the steps before it did not need; run the same step twice before it is captured"});
  }
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
  memory_functions<cudaStream_t> programs_;
  cudaMemPool_t pool_ = nullptr;  ///< null where memory comes from the program
  std::size_t held_ = 0;
  registered_blocks registered_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
