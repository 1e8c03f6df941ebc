// Special memory of `cuda` devices: pinned memory of the host, and memory that a communication library has registered.
// Tests: tests/cuda/offload.cpp, tests/cuda/checkpoint_staging.cpp, tests/cuda/comm_nccl_memory.cpp.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_launch.hpp"
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

/// Pinned memory under device/allocator.hpp, which a GPU's kernels read and write at the address that the host uses
/// (cuda::options::offload_optimizer). What is released to it must not be in use by a kernel any more.
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

namespace plait {

/// A piece of a GPU's memory that a communication library has registered (comm/launch/nccl.hpp), from which a device
/// serves the buffers that collectives read and write; and the option that asked for it, which errors name.
struct registered_memory {
  std::shared_ptr<void> data;
  std::size_t bytes = 0;
  std::string option;
};

namespace detail {

/// Hands out blocks of a piece of memory, each from the first hole that has room for it.
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

  /// Null where no hole has room. On a boundary of 256 bytes.
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
  std::map<std::size_t, std::size_t> holes_;  ///< offset and bytes
  std::size_t used_ = 0;
};

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
