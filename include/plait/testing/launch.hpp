// The way in which parity checks start their ranks where nothing else is said: threads on the cpu. It is no launcher
// of programs. Next: testing/launch_cuda.hpp for a GPU, comm/threads.hpp for `threads::run`.
#pragma once

#include "plait/comm/threads.hpp"
#ifndef __CUDACC__
#include "plait/device/cpu.hpp"
#endif

namespace plait::testing {

#ifdef __CUDACC__
struct on_cpu;  // nvcc cannot compile what the cpu computes with: name on_one_gpu
#else
/// How a parity test starts its ranks: as threads on the cpu. On a GPU that they share: `on_one_gpu` (launch_cuda.hpp).
/// Anything that calls body(communicator, device) on every rank will do.
struct on_cpu {
  template <class F>
  void operator()(int ranks, F&& body) const {
    threads::run(ranks, [&](threads::communicator& comm) {
      cpu device;
      body(comm, device);
    });
  }
};
#endif

}  // namespace plait::testing
