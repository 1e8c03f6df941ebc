// expect: PLAIT_NO_CPU leaves out the CPU, and PLAIT_COMPILED_CUDA is not defined: there is no device for layers
#ifndef PLAIT_FAIL_FIX
#define PLAIT_NO_CPU
#endif
#include "plait/kernels/kernels.hpp"
