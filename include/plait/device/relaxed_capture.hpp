// The permission to ask for events and to wait for streams while another part of the program records a graph.
#pragma once

#include <cuda_runtime.h>

#include "plait/core/macros_off.hpp"

namespace plait::detail {

/// While it lives, the thread may ask for events, wait for streams, and take and give back memory though some stream is
/// being recorded into a graph, maybe by another part of the program, in whatever mode: none of them is of that
/// recording.
class relaxed_capture {
 public:
  relaxed_capture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  relaxed_capture(const relaxed_capture&) = delete;
  relaxed_capture& operator=(const relaxed_capture&) = delete;
  ~relaxed_capture() { static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_)); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
