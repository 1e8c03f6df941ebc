#pragma once

#include <string>
#include <vector>

namespace bench {

/// The time of a kind of kernel, copy or fill on the GPU, measured by CUPTI.
struct kernel_time {
  std::string name;
  double seconds = 0;
  long count = 0;
};

/// Whether kernels can be timed: this was built with CUPTI, and there is a GPU.
bool kernels_can_be_timed();
/// Starts to time each kernel, copy and fill on the GPU, which may slow them down a little. Throws `plait::error` if
/// CUPTI refuses.
void start_timing_kernels();
/// Stops, and returns the times since the start, the longest kind first. The GPU must be idle.
std::vector<kernel_time> stop_timing_kernels();

}  // namespace bench
