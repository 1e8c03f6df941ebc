// Memory of `cuda` devices: the pool, pinned host memory, the ring of uploads, and memory that a communication library
// has registered. Tests: tests/cuda/device/memory.cpp, tests/cuda/parallel/offload.cpp,
// tests/cuda/comm/comm_nccl_memory.cpp.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/allocator.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/io/byte_buffer.hpp"

namespace plait::detail {

/// Returns memory of `cudaHostAlloc`, which every GPU of the process can access. If the host's memory is exhausted,
/// throws `error` that names `what_for` and gives the advice `what_to_do`.
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

/// A source of pinned host memory for device/allocator.hpp, for copies of activations and for offloaded optimizers
/// (cuda::options::offload_optimizer). Kernels access it at the host's address. A released block must not be in use by
/// a kernel.
struct pinned_memory {
  void* allocate(std::size_t bytes, std::uintptr_t) const {
    return allocate_pinned(bytes, "offloaded data (options::offload_optimizer, offload_activations)",
                           "offload on fewer ranks of a machine, cut the optimizer's state over more ranks "
                           "(zero_level::optimizer)");
  }
  void release(void* pointer, std::size_t, std::uintptr_t) const noexcept { cudaFreeHost(pointer); }
};

/// Pinned memory that saves copy to. It belongs to no device object.
struct pinned_staging {
  static std::byte* allocate(std::size_t bytes) {
    return static_cast<std::byte*>(allocate_pinned(
        bytes, "saver_options::pinned_bytes",
        "set it to 0, so that saves are staged in pageable memory and wait longer, save on more ranks"));
  }
  static void release(std::byte* memory) { cudaFreeHost(memory); }
  /// Named functions instead of lambdas: g++ does not compile nvcc's output for lambdas as pointers.
  static host_memory functions() { return {allocate, release}; }
};

}  // namespace plait::detail

namespace plait {

/// Memory of a GPU that a communication library has registered (comm/launch/nccl.hpp). A device takes the buffers of
/// collectives from it. Errors name the option that set its size.
struct registered_memory {
  std::shared_ptr<void> data;
  std::size_t bytes = 0;
  std::string option;
};

namespace detail {

/// Allocates blocks within a piece of memory, each in the first hole that is large enough.
class registered_blocks {
 public:
  registered_blocks() = default;
  explicit registered_blocks(registered_memory memory) : memory_(std::move(memory)) {
    if (memory_.bytes >= grain) holes_.emplace(0, memory_.bytes / grain * grain);
  }

  const registered_memory& memory() const { return memory_; }
  explicit operator bool() const { return memory_.data != nullptr; }
  bool holds(const void* pointer) const {
    const auto at = reinterpret_cast<std::uintptr_t>(pointer), begin = reinterpret_cast<std::uintptr_t>(begin_of());
    return begin != 0 && at >= begin && at - begin < memory_.bytes;
  }

  /// Returns a block on a 256-byte boundary, or null if no hole is large enough.
  void* try_allocate(std::size_t bytes) {
    const std::size_t size = rounded(bytes);
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      const auto [offset, room] = *hole;
      if (room < size) continue;
      holes_.erase(hole);
      if (room > size) holes_.emplace(offset + size, room - size);
      used_ += size;
      return begin_of() + offset;
    }
    return nullptr;
  }
  void release(void* pointer, std::size_t bytes) {
    auto hole =
        holes_.emplace(static_cast<std::size_t>(static_cast<char*>(pointer) - begin_of()), rounded(bytes)).first;
    used_ -= hole->second;
    if (const auto next = std::next(hole); next != holes_.end() && hole->first + hole->second == next->first) {
      hole->second += next->second;
      holes_.erase(next);
    }
    if (hole == holes_.begin()) return;
    if (const auto before = std::prev(hole); before->first + before->second == hole->first) {
      before->second += hole->second;
      holes_.erase(hole);
    }
  }

  std::string exhausted(std::size_t bytes) const {
    return cat({"cuda: the memory for collectives has no room for ", bytes, " bytes: ", memory_.option, " is ",
                memory_.bytes, ", of which ", used_, " are in use; use a larger ", memory_.option,
                ", or 0 for memory that is not registered"});
  }

 private:
  static constexpr std::size_t grain = 256;
  static constexpr std::size_t rounded(std::size_t bytes) { return (bytes + grain - 1) / grain * grain; }
  char* begin_of() const { return static_cast<char*>(memory_.data.get()); }

  registered_memory memory_;
  std::map<std::size_t, std::size_t> holes_;  ///< from offset to bytes
  std::size_t used_ = 0;
};

/// The source of memory of a CUDA device's caching allocator (device/allocator.hpp). It is a private stream-ordered
/// pool of each device object, which keeps released memory, or the program's allocator. Blocks are allocated and
/// released in the order of their stream.
class cuda_pool {
 public:
  explicit cuda_pool(int device, const std::vector<int>& peers = {}, memory_functions<cudaStream_t> programs = {})
      : device_(device), programs_(std::move(programs)) {
    programs_.require_both("cuda");
    if (programs_) return;
    cudaMemPoolProps wanted{};
    wanted.allocType = cudaMemAllocationTypePinned;  // CUDA's term for memory that stays on its device
    wanted.location.type = cudaMemLocationTypeDevice;
    wanted.location.id = device;
    cuda_check(cudaMemPoolCreate(&pool_, &wanted), "making a memory pool");
    std::uint64_t keep_all = ~std::uint64_t{0};
    cuda_check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all), "setting up a memory pool");
    allow_access_from(peers);
  }
  cuda_pool(const cuda_pool&) = delete;
  cuda_pool& operator=(const cuda_pool&) = delete;
  ~cuda_pool() {
    if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
  }

  /// Gives other GPUs of the process access, if the machine connects them. Otherwise NCCL copies by way of the host.
  /// For its own allocator, the program itself gives the access.
  void allow_access_from(const std::vector<int>& peers) {
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

  /// Uses `memory` for the buffers of collectives, the blocks of `key_for_collectives`.
  void serve_collectives(registered_memory memory) {
    if (registered_) fail({"cuda: device ", device_, " has memory for collectives already: its ", memory.option});
    registered_ = registered_blocks(std::move(memory));
  }
  const registered_memory& served_to_collectives() const { return registered_.memory(); }
  std::uintptr_t key_for_collectives(std::uintptr_t stream) const {
    return registered_ ? stream | registered_key : stream;
  }
  /// Returns the key under which a released block is kept.
  std::uintptr_t key_of(const void* pointer, std::uintptr_t stream) const {
    return registered_.holds(pointer) ? stream | registered_key : stream;
  }

  /// Returns null if memory is exhausted.
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

  /// Waits for these streams, and returns their released memory to the driver. A large block may need the memory of
  /// several released ones.
  void await_releases(const std::vector<std::uintptr_t>& streams) {
    const relaxed_capture relaxed;
    for (const std::uintptr_t key : streams) {
      const auto stream = reinterpret_cast<cudaStream_t>(key & ~registered_key);
      if (!is_captured(stream)) cuda_check(cudaStreamSynchronize(stream), "waiting for a stream");
    }
    trim();
  }

  /// Returns released memory to the driver, as far as streams have reached its release.
  void trim() {
    if (pool_ != nullptr) cuda_check(cudaMemPoolTrimTo(pool_, 0), "giving memory back");
  }

  std::size_t expected = 0;  ///< the plan's prediction, for error texts

 private:
  /// A bit in the stream key of registered memory. No address has this bit.
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
    if (!is_captured(stream)) return;
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
  cudaMemPool_t pool_ = nullptr;  ///< null if the program's allocator is used
  std::size_t held_ = 0;
  registered_blocks registered_;
};

/// Pinned memory through which the host uploads to a GPU, for one device object and its thread. The source may change
/// or be freed when the call returns. For pageable memory CUDA promises that only when it copies the data first; a GPU
/// that reads such memory directly (Grace Hopper, or with heterogeneous memory management) reads it later. If the ring
/// is full, the host waits for the oldest copy.
class upload_ring {
 public:
  explicit upload_ring(std::size_t bytes = std::size_t{4} << 20) : bytes_(bytes) {}
  upload_ring(const upload_ring&) = delete;
  upload_ring& operator=(const upload_ring&) = delete;
  /// Waits for the copies in all streams, because they read this memory.
  ~upload_ring() {
    for (const piece& p : pieces_) cudaEventSynchronize(p.event.get());
    if (memory_ != nullptr) cudaFreeHost(memory_);
  }

  void upload(void* to, const void* from_host, std::size_t bytes, cudaStream_t stream) {
    if (memory_ == nullptr) {
      void* memory = nullptr;
      cuda_check(cudaMallocHost(&memory, bytes_), "allocating pinned memory for uploads");
      memory_ = static_cast<std::byte*>(memory);
    }
    const auto* from = static_cast<const std::byte*>(from_host);
    auto* target = static_cast<std::byte*>(to);
    while (bytes != 0) {  // in quarters: the device copies one while the host writes the next
      const std::size_t n = std::min(bytes, bytes_ / 4), begin = room((n + 63) / 64 * 64);
      std::memcpy(memory_ + begin, from, n);
      cuda_check(cudaMemcpyAsync(target, memory_ + begin, n, cudaMemcpyDefault, stream), "uploading");
      pieces_.push_back({idle_event(), begin});
      cuda_check(cudaEventRecord(pieces_.back().event.get(), stream), "recording an event");
      from += n;
      target += n;
      bytes -= n;
    }
  }

 private:
  struct piece {
    owned_event event;
    std::size_t begin;
  };

  /// Returns the offset of `bytes` bytes that no copy reads any more. Pieces are in the order of their age, around the
  /// ring.
  std::size_t room(std::size_t bytes) {
    if (next_ + bytes > bytes_) {
      while (!pieces_.empty() && pieces_.front().begin >= next_) retire();
      next_ = 0;
    }
    while (!pieces_.empty() && pieces_.front().begin >= next_ && pieces_.front().begin < next_ + bytes) retire();
    const std::size_t begin = next_;
    next_ += bytes;
    return begin;
  }
  void retire() {
    cuda_check(cudaEventSynchronize(pieces_.front().event.get()), "waiting for an upload");
    idle_.push_back(std::move(pieces_.front().event));
    pieces_.pop_front();
  }
  owned_event idle_event() {
    if (idle_.empty()) return make_event();
    owned_event e = std::move(idle_.back());
    idle_.pop_back();
    return e;
  }

  std::size_t bytes_;
  std::byte* memory_ = nullptr;
  std::size_t next_ = 0;
  std::deque<piece> pieces_;
  std::vector<owned_event> idle_;
};

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
