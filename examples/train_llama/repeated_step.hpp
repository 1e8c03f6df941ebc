#pragma once

#include "options.hpp"
#include "plait/comm/any_communicator.hpp"
#include "plait/tensor/context.hpp"

/// How a device repeats a step: as it is. (GPUs: cuda_llama_run.hpp.)
template <class Step, plait::compute_device Device>
class repeated_step {
 public:
  repeated_step(plait::context<Device>&, Step& step, const setup&, plait::any_communicator&) : step_(step) {}
  void run(plait::context<Device>& ctx) { step_.run(ctx); }
  /// Whether the next run is one that the ledger does not see.
  bool replays() const { return false; }

 private:
  Step& step_;
};
