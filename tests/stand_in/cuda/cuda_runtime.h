// A stand-in for the CUDA runtime, for tests: CUDA code compiles as C++, and its kernels run on the CPU.
// What it holds a program to is said in the headers that follow.
#pragma once

#include "stand_in/api_copies.hpp"
#include "stand_in/api_device.hpp"
#include "stand_in/api_graphs.hpp"
#include "stand_in/api_memory.hpp"
#include "stand_in/api_streams.hpp"
#include "stand_in/device_functions.hpp"
