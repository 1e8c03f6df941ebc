#include "kernel_times.hpp"
#include "plait/core/error.hpp"

bool bench::kernels_can_be_timed() { return false; }

void bench::start_timing_kernels() { plait::fail("kernels cannot be timed: built without CUPTI"); }

std::vector<bench::kernel_time> bench::stop_timing_kernels() { return {}; }
