// Pinned host memory through which a GPU gets what the host uploads. It is for one device object and its thread; large
// transfers of one's own go around it with cudaMemcpyAsync.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_check.hpp"

namespace plait::detail {

/// Copies to a device whose source may die, or change, as soon as the call returns. CUDA itself promises that for
/// pageable memory only where it stages the copy; a GPU that reads such memory by itself (Grace Hopper, or with
/// heterogeneous memory management) reads it when the stream gets there. The host runs ahead by as much as the ring
/// holds, and waits for the oldest copy then.
class upload_ring {
 public:
  explicit upload_ring(std::size_t bytes = std::size_t{4} << 20) : bytes_(bytes) {}
  upload_ring(const upload_ring&) = delete;
  upload_ring& operator=(const upload_ring&) = delete;
  /// Waits for the copies, in whatever stream they are: they read the memory that goes.
  ~upload_ring() {
    for (const piece& p : pieces_) {
      cudaEventSynchronize(p.event);
      cudaEventDestroy(p.event);
    }
    for (const cudaEvent_t e : idle_) cudaEventDestroy(e);
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
    while (bytes != 0) {  // in quarters, so that the device copies one while the host writes the next
      const std::size_t n = std::min(bytes, bytes_ / 4), begin = room((n + 63) / 64 * 64);
      std::memcpy(memory_ + begin, from, n);
      cuda_check(cudaMemcpyAsync(target, memory_ + begin, n, cudaMemcpyDefault, stream), "uploading");
      pieces_.push_back({idle_event(), begin});
      cuda_check(cudaEventRecord(pieces_.back().event, stream), "recording an event");
      from += n;
      target += n;
      bytes -= n;
    }
  }

 private:
  struct piece {
    cudaEvent_t event;
    std::size_t begin;
  };

  /// The beginning of `bytes` bytes that no copy reads any more. Pieces lie in the order of their age, around the ring.
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
    cuda_check(cudaEventSynchronize(pieces_.front().event), "waiting for an upload");
    idle_.push_back(pieces_.front().event);
    pieces_.pop_front();
  }
  cudaEvent_t idle_event() {
    if (!idle_.empty()) {
      const cudaEvent_t e = idle_.back();
      idle_.pop_back();
      return e;
    }
    cudaEvent_t made = nullptr;
    cuda_check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "making an event");
    return made;
  }

  std::size_t bytes_;
  std::byte* memory_ = nullptr;
  std::size_t next_ = 0;
  std::deque<piece> pieces_;
  std::vector<cudaEvent_t> idle_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
