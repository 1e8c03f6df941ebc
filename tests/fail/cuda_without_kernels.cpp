// expect: the kernels of layers on GPUs are neither compiled here nor elsewhere: let nvcc compile this file, or define PLAIT_COMPILED_CUDA
#ifndef PLAIT_FAIL_FIX
#include "plait/cuda.hpp"
#endif
