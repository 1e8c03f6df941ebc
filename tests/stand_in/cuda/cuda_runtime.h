// A stand-in for the CUDA runtime, for tests: CUDA code compiles as C++, and its kernels run on the CPU. The headers in
// stand_in/ document which errors of a program it reports.
#pragma once

#include "stand_in/api_device.hpp"
#include "stand_in/api_graphs.hpp"
#include "stand_in/api_memory.hpp"
#include "stand_in/api_streams.hpp"
#include "stand_in/device_functions.hpp"
