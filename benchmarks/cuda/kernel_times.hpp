#pragma once

#include <string>
#include <vector>

namespace bench {

/// What a kind of kernel, copy or fill took on the GPU, by CUPTI's account.
struct kernel_time {
  std::string name;
  double seconds = 0;
  long count = 0;
};

/// Whether kernels can be timed: built with CUPTI, and on a GPU.
bool kernels_can_be_timed();
/// Everything that runs on the GPU from now on is timed one by one, which may slow it down a little. Throws
/// `plait::error` where CUPTI refuses.
void start_timing_kernels();
/// What ran since, the longest kind first. The GPU must be idle.
std::vector<kernel_time> stop_timing_kernels();

}  // namespace bench
