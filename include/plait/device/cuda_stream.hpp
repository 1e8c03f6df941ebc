// A CUDA stream with an owner, for the streams that plait makes, and a wait for one by another thread. Handles without
// an owner are `cuda::stream`, in device/cuda.hpp.
#pragma once

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <type_traits>

#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_check.hpp"

namespace plait::detail {

struct stream_destroyer {
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};
/// Operations that the stream holds at its end run all the same.
using owned_stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, stream_destroyer>;

inline owned_stream make_stream(int priority = 0) {
  cudaStream_t made = nullptr;
  cuda_check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, priority), "making a stream");
  return owned_stream(made);
}
/// Makes a stream of the highest priority on the calling thread's GPU, for communication: what waits for it is idle
/// otherwise.
inline owned_stream make_urgent_stream() {
  int least = 0, greatest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
  return make_stream(greatest);
}

/// Returns a function that waits, in any thread and without a core, for what the stream of the device holds now. It
/// chooses that thread's device, which a call of CUDA's would else make memory on the first one for.
inline std::function<void()> waiter_for(cudaStream_t stream, int device) {
  cudaEvent_t made = nullptr;
  cuda_check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming | cudaEventBlockingSync), "making an event");
  const std::shared_ptr<std::remove_pointer_t<cudaEvent_t>> event(made, [](cudaEvent_t e) { cudaEventDestroy(e); });
  cuda_check(cudaEventRecord(made, stream), "recording an event");
  return [event, device] {
    cuda_check(cudaSetDevice(device), "choosing the GPU");
    cuda_check(cudaEventSynchronize(event.get()), "waiting for an event");
  };
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
