// In-process ranks on the memory of a GPU that they share. The last rank to arrive enqueues an operation's kernel or
// copies after all that the ranks had enqueued before. Every rank's main stream waits for them. Ranks with a GPU each
// use comm/launch/nccl.hpp.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "plait/comm/threads.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"

namespace plait::threads {

namespace detail {

/// An event of a stream, kept between operations.
class cuda_mark final : public device_mark {
 public:
  cuda::event event;
};

inline cuda_mark& mark_in(std::unique_ptr<device_mark>& place) {
  if (place == nullptr) place = std::make_unique<cuda_mark>();
  return static_cast<cuda_mark&>(*place);
}

}  // namespace detail

/// Runs operations on a GPU: after what the ranks have put into their main streams, in the last arriver's side stream.
/// All ranks of a group share one GPU.
class cuda_engine : public device_engine {
 public:
  cuda_engine(cudaStream_t main, cudaStream_t side) : main_(main), side_(side) {}
  explicit cuda_engine(const cuda& device)
      : cuda_engine(device.main_stream().handle(), device.side_stream().handle()) {}

  /// From the next operation on.
  void set_streams(cudaStream_t main, cudaStream_t side) {
    main_ = cuda::stream(main);
    side_ = cuda::stream(side);
  }

  void check(const char* what, const void* data) const override {
    cudaPointerAttributes found{};
    const cudaError_t status = cudaPointerGetAttributes(&found, data);
    if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
    if (status != cudaSuccess || found.type == cudaMemoryTypeUnregistered) {
      fail({what,
            ": a pointer to the host's memory, but this communicator works on a device's; upload "
            "the data, or use the communicator that has no device"});
    }
    int here = 0;
    plait::detail::cuda_check(cudaGetDevice(&here), "asking for the GPU");
    if (found.type == cudaMemoryTypeDevice && found.device != here) {
      fail({what, ": memory of device ", found.device, " on a rank of device ", here,
            "; in-process ranks share one GPU (use NCCL for several)"});
    }
  }

  void arrive(detail::part& mine) override { detail::mark_in(mine.mark).event.record(main_); }

  void run(detail::operation& op) override {
    for (detail::part& p : op.parts) side_.wait(detail::mark_in(p.mark).event);
    enqueue(op);
    detail::mark_in(op.end).event.record(side_);
  }

  void leave(detail::operation& op) override { main_.wait(detail::mark_in(op.end).event); }
  bool reached(detail::operation& op) const override {
    return static_cast<const detail::cuda_mark&>(*op.end).event.done();
  }

 private:
  /// Puts the kernel or the copies of an operation into the side stream.
  void enqueue(detail::operation& op);

  cuda::stream main_, side_;
};

/// Returns the ranks of `comm` on the memory of a GPU that they share. Collective. Each rank has its own device object,
/// which must outlive the communicator, its splits and its requests. Calls return when the ranks have met; the data is
/// there for whatever is put into the main stream from then on.
inline communicator on(communicator& comm, const cuda& device) {
  return comm.on(std::make_shared<cuda_engine>(device));
}

/// Runs `body(communicator, device)` on `ranks` threads that share a GPU; errors as in `run(ranks, body)`.
template <class F>
void run(int ranks, const cuda::options& options, F&& body) {
  run(ranks, [&](communicator& host) {
    cuda device(options);
    communicator comm = on(host, device);
    body(comm, device);
  });
}

}  // namespace plait::threads

#ifdef PLAIT_CUDA_KERNELS
#include "plait/comm/threads/cuda.ipp"
#endif

#include "plait/core/macros_on.hpp"
