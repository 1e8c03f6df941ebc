// The ranks of a parity check as threads that share one GPU, without NCCL. It does not spread ranks over several GPUs.
#pragma once

#include "plait/comm/threads/cuda.hpp"

namespace plait::testing {

/// Starts the ranks of a parity test as threads that share one GPU:
///
///     check_model(one, meshes, how, make, on_one_gpu{})
struct on_one_gpu {
  cuda::options options{};

  template <class F>
  void operator()(int ranks, F&& body) const {
    threads::run(ranks, options, [&](threads::communicator& comm, cuda& device) { body(comm, device); });
  }
};

}  // namespace plait::testing
