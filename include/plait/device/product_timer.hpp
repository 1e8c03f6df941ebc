// The time that a product takes on a GPU, into scratch memory that stands for its output. Test:
// tests/cuda/products.cpp.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>

#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_check.hpp"

namespace plait::detail {

/// Scratch memory of CUDA's default pool and two events, for products in one stream. An exception between a product's
/// start and its end gives the memory back in the order of the stream.
class product_timer {
 public:
  product_timer(std::size_t bytes, cudaStream_t stream) : stream_(stream) {
    const cudaError_t status = cudaMallocAsync(&scratch_, bytes, stream);
    if (status == cudaErrorMemoryAllocation) {
      static_cast<void>(cudaGetLastError());
      scratch_ = nullptr;
      return;
    }
    cuda_check(status, "allocating scratch memory for a product");
    if (cudaEventCreate(&begin_) == cudaSuccess && cudaEventCreate(&end_) == cudaSuccess) return;
    const cudaError_t problem = cudaGetLastError();
    release();
    cuda_check(problem, "making an event");
  }
  product_timer(const product_timer&) = delete;
  product_timer& operator=(const product_timer&) = delete;
  ~product_timer() { release(); }

  /// False where there was no room for the scratch memory.
  bool has_room() const { return scratch_ != nullptr; }

  /// The least time of three, after one that loads the kernel; `start(scratch)` puts the product into the stream.
  template <class Start>
  double microseconds_of(const Start& start) const {
    float best = 0;
    for (int turn = 0; turn < 4; ++turn) {
      cuda_check(cudaEventRecord(begin_, stream_), "recording an event");
      start(scratch_);
      cuda_check(cudaEventRecord(end_, stream_), "recording an event");
      cuda_check(cudaEventSynchronize(end_), "waiting for an event");
      float milliseconds = 0;
      cuda_check(cudaEventElapsedTime(&milliseconds, begin_, end_), "timing a product");
      if (turn > 0) best = turn == 1 ? milliseconds : std::min(best, milliseconds);
    }
    return 1e3 * static_cast<double>(best);
  }

 private:
  void release() {
    for (const cudaEvent_t e : {begin_, end_})
      if (e != nullptr) cudaEventDestroy(e);
    if (scratch_ != nullptr) cudaFreeAsync(scratch_, stream_);
  }

  cudaStream_t stream_;
  void* scratch_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
