// How parity checks start their ranks by default: threads on the CPU.
#pragma once

#include "plait/comm/threads.hpp"
#include "plait/core/compiled.hpp"
#ifndef PLAIT_NO_CPU
#include "plait/device/cpu.hpp"
#endif

namespace plait::testing {

#ifdef PLAIT_NO_CPU
struct on_cpu;  // the cpu is no device here: name on_one_gpu
#else
/// How a parity test starts its ranks: as threads on the cpu. On a GPU that they share: `on_one_gpu` (launch_cuda.hpp).
/// Anything that calls body(communicator, device) on every rank will do.
struct on_cpu {
  cpu::options device{};

  template <class F>
  void operator()(int ranks, F&& body) const {
    threads::run(ranks, [&](threads::communicator& comm) {
      cpu own(device);
      body(comm, own);
    });
  }
};
#endif

}  // namespace plait::testing
