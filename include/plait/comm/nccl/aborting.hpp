// The end of NCCL communicators whose ranks have failed, within a grace time. Test: tests/cuda/comm_nccl.cpp.
#pragma once

#include <cuda_runtime.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/nccl/types.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::nccl::detail {

/// A communicator that is to be aborted, and its GPU.
struct doomed_communicator {
  ncclComm_t comm;
  int device;
};

/// Aborts communicators side by side: each may wait for kernels that only the end of another lets go. Ends the process
/// where they take longer than `grace` seconds (0: waits for ever), because whoever waits for it would wait for ever.
inline void abort_side_by_side(const std::vector<doomed_communicator>& doomed, double grace, const std::string& why) {
  struct progress {
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t left;
  };
  const auto shared = std::make_shared<progress>();
  shared->left = doomed.size();
  for (const doomed_communicator& one : doomed) {
    std::thread([one, shared] {
      static_cast<void>(cudaSetDevice(one.device));  // as the watching thread does: NCCL goes back to the thread's GPU
      ncclCommAbort(one.comm);
      const std::lock_guard lock(shared->mutex);
      --shared->left;
      shared->changed.notify_one();
    }).detach();
  }
  std::unique_lock lock(shared->mutex);
  const auto all = [&] { return shared->left == 0; };
  if (grace <= 0) return shared->changed.wait(lock, all);
  if (shared->changed.wait_for(lock, std::chrono::duration<double>(grace), all)) return;
  std::fprintf(stderr,
               "plait: %s\nplait: NCCL did not abort %zu of %zu communicators within the grace of %g s; the process "
               "ends\n",
               why.c_str(), shared->left, doomed.size(), grace);
  std::abort();
}

}  // namespace plait::nccl::detail

#include "plait/core/macros_on.hpp"
