// Work of a GPU's main stream, recorded as a CUDA graph and launched again. Test: tests/cuda/graph.cpp.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"

namespace plait {

/// Work of a device's main stream, recorded once and replayed with one launch: the gaps between small kernels go. What
/// was recorded is addresses and numbers, so a replay reads and writes the same memory: what `work` asks the device for
/// belongs to the graph until its end. Buffers from before the recording are the caller's to
/// keep. The device must outlive it.
class cuda_graph {
 public:
  explicit cuda_graph(cuda& device) : device_(device) {}
  cuda_graph(const cuda_graph&) = delete;
  cuda_graph& operator=(const cuda_graph&) = delete;
  ~cuda_graph() { reset(); }

  explicit operator bool() const { return executable_ != nullptr; }

  /// Records what `work` puts into the main stream, without running it. `work` must have run before in the same way, so
  /// that the memory it asks for is there; it may not wait for the device, upload or download. Throws `plait::error`
  /// otherwise, with nothing recorded.
  template <class Work>
  void record(Work&& work) {
    reset();
    const cudaStream_t stream = device_.main_stream().handle();
    scratch_ = device_.begin_scratch();
    if (const cudaError_t status = cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
        status != cudaSuccess) {
      give_back();
      detail::cuda_check(status, "beginning a graph");
    }
    cudaGraph_t graph = nullptr;
    try {
      std::forward<Work>(work)();
    } catch (...) {
      static_cast<void>(cudaStreamEndCapture(stream, &graph));
      static_cast<void>(cudaGetLastError());
      if (graph != nullptr) cudaGraphDestroy(graph);
      give_back();
      throw;
    }
    device_.end_scratch();
    cudaError_t status = cudaStreamEndCapture(stream, &graph);
    if (status == cudaSuccess) {
      status = cudaGraphInstantiate(&executable_, graph, 0);
      cudaGraphDestroy(graph);
    }
    if (status == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());
    executable_ = nullptr;
    give_back();
    detail::cuda_check(status, "recording a graph");
  }

  /// Puts all of it into the main stream.
  void launch() {
    if (executable_ == nullptr) fail("cuda_graph: nothing is recorded");
    detail::cuda_check(cudaGraphLaunch(executable_, device_.main_stream().handle()), "launching a graph");
  }

  /// Forgets what is recorded. Its memory serves others again, in the main stream and so after the last replay.
  void reset() {
    if (executable_ == nullptr) return;
    cudaGraphExecDestroy(std::exchange(executable_, nullptr));
    give_back();
  }

  /// Bytes of device memory that replays use, without buffers from before the recording.
  std::size_t scratch_bytes() const { return scratch_ == nullptr ? 0 : scratch_->bytes(); }

 private:
  void give_back() { device_.give_back(std::exchange(scratch_, nullptr)); }

  cuda& device_;
  std::shared_ptr<cuda::scratch> scratch_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
