// Uses plait in a CUDA program that has its own communicator, stream and memory. A program without an `ncclComm_t`
// starts with comm/launch/nccl.hpp.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "plait/comm/launch/nccl.hpp"
#include "plait/comm/world.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/tensor/microbatch.hpp"

namespace plait {

/// The resources that plait takes when it is attached to a program.
struct attach_options {
  std::size_t workspace_bytes = std::size_t{32} << 20;  ///< device memory for products
  bool tf32 = false;                                    ///< see cuda::options
  double deadline = 600;                                ///< see nccl::options
  std::uint64_t seed = 0;                               ///< of weights and dropout
  std::size_t registered_bytes = 0;                     ///< see nccl::options
  /// The program's own allocator. All device memory comes from it, except one word for the thread that watches for lost
  /// ranks; see cuda::options.
  memory_functions<cudaStream_t> memory{};
};

/// One rank of a mesh in a CUDA program that has its own communicator, stream and GPU. It converts to `context<cuda>&`
/// and `microbatch<cuda>`, and must outlive the layers that are made with it. The communicator and the stream remain
/// the caller's and must outlive it. No other code may use the communicator while layers issue work. Making layers
/// splits the communicator, so the caller's work must not be in flight on it then.
///
/// Layers enqueue their work in the caller's stream and do not wait for it. plait owns the workspace, a stream for
/// started collectives, the communicators of the mesh's groups, and a thread that watches for lost ranks. While a layer
/// runs, plait also owns memory for gathered data. The destructor waits for the stream.
class attached_rank {
 public:
  /// Collective. Throws `plait::error` if the communicator is null or its number of ranks differs from the mesh's.
  attached_rank(const mesh_shape& shape, ncclComm_t comm, cudaStream_t stream, const dim_sizes& sizes,
                const attach_options& options)
      : device_({.device = device_of(comm),
                 .tf32 = options.tf32,
                 .workspace_bytes = options.workspace_bytes,
                 .main = named(stream),
                 .memory = options.memory}),
        ranks_(shape, nccl::attach(comm, device_,
                                   {.deadline = options.deadline, .registered_bytes = options.registered_bytes})),
        context_{device_, ranks_, sizes, options.seed} {
    allow_access_from_process(static_cast<bool>(options.memory));
  }
  attached_rank(const attached_rank&) = delete;
  attached_rank& operator=(const attached_rank&) = delete;

  cuda& device() { return device_; }
  world& ranks() { return ranks_; }
  plait::context<cuda>& context() { return context_; }
  const plait::context<cuda>& context() const { return context_; }
  operator plait::context<cuda>&() { return context_; }
  operator microbatch<cuda>() { return context_; }

 private:
  static int device_of(ncclComm_t comm) {
    nccl::detail::require_given(comm);
    int device = 0;
    nccl::detail::check(ncclCommCuDevice(comm, &device), "ncclCommCuDevice");
    return device;
  }
  /// Gives the other GPUs of this process access to the device's memory, because NCCL lets ranks of one process read
  /// each other's memory.
  void allow_access_from_process(bool programs_memory) {
    static const std::uint64_t process = std::random_device{}() | std::uint64_t{std::random_device{}()} << 32;
    struct place {
      std::uint64_t process, device;
    };
    nccl::detail::state& all = ranks_.root().get_if<nccl::communicator>()->shared_state();
    const auto n = static_cast<std::size_t>(all.size);
    if (n == 1) return;
    void* memory = nullptr;
    const cuda::stream side = device_.side_stream();  // the caller's stream may hold work that has not begun
    if (programs_memory) {
      programs_places_ = buffer<cuda>(device_, (n + 1) * sizeof(place), side);  // allocated in the order of this
                                                                                // stream
      memory = programs_places_.data();
    } else {  // outside the pool, whose memory other GPUs cannot access yet
      detail::cuda_check(cudaMalloc(&memory, (n + 1) * sizeof(place)), "allocating");
      places_.reset(memory);  // freed in the destructor, because freeing waits for the device
    }
    const place mine{process, static_cast<std::uint64_t>(device_.index())};
    std::vector<place> there(n);
    device_.upload(memory, &mine, sizeof mine, side);
    const auto op = all.begin("attach", sizeof mine);
    all.issue(*op, "ncclAllGather", [&] {
      return ncclAllGather(memory, static_cast<place*>(memory) + 1, 2, ncclInt64, all.link.comm, side.handle());
    });
    all.home->enqueued(*op, side);
    device_.download(there.data(), static_cast<place*>(memory) + 1, n * sizeof(place), side);
    std::vector<int> peers;
    for (const place& p : there) {
      if (p.process == process) peers.push_back(static_cast<int>(p.device));
    }
    device_.allow_access_from(peers);
  }
  /// Returns a handle that is not null for the default stream: a null handle would make the device create its own
  /// stream.
  static cudaStream_t named(cudaStream_t stream) {
    if (stream != nullptr) return stream;
#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
    return cudaStreamPerThread;
#else
    return cudaStreamLegacy;
#endif
  }

  std::unique_ptr<void, cudaError_t (*)(void*)> places_{nullptr, cudaFree};
  cuda device_;
  buffer<cuda> programs_places_;
  world ranks_;
  plait::context<cuda> context_;
};

template <spec_like Spec>
box part_of(const attached_rank& here) {
  return part_of<Spec>(here.context());
}

/// Takes all ranks of the caller's communicator, in order, as the ranks of `shape`. `sizes` are the global sizes of the
/// dims that layers will use; the context also accepts them later.
template <mesh_like Mesh>
attached_rank attach(const Mesh& shape, ncclComm_t comm, cudaStream_t stream, const dim_sizes& sizes = {},
                     const attach_options& options = {}) {
  return attached_rank(shape.shape(), comm, stream, sizes, options);
}

/// Attaches to a mesh with at most one dynamic extent, which is derived from the communicator's number of ranks.
template <mesh_like Mesh>
  requires(Mesh::rank_dynamic <= 1)
attached_rank attach(ncclComm_t comm, cudaStream_t stream, const dim_sizes& sizes = {},
                     const attach_options& options = {}) {
  nccl::detail::require_given(comm);
  mesh_shape shape = Mesh::static_shape();
  int ranks = 0;
  nccl::detail::check(ncclCommCount(comm, &ranks), "ncclCommCount");
  std::int64_t known = 1;
  for (const std::int64_t extent : shape.extents) known *= extent == dynamic ? 1 : extent;
  for (std::size_t i = 0; i < shape.axes.size(); ++i) {
    if (shape.extents[i] != dynamic) continue;
    if (ranks % known != 0) {
      fail({"attach: the communicator has ", ranks, " ranks, which the other axes' ", known, " do not divide, so ",
            shape.axes[i].text(), " has no extent; take ", ranks / known * known, " or ", (ranks / known + 1) * known,
            " ranks"});
    }
    shape.extents[i] = ranks / known;
  }
  return attached_rank(shape, comm, stream, sizes, options);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
