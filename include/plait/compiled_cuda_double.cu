// The kernels of compiled_cuda.cu that compute in double: checks of layouts do, training seldom. A file of its own,
// because two compile side by side.
#undef PLAIT_COMPILED_CUDA  // which may be defined for all files of a program
#define PLAIT_COMPILED_CUDA
#define PLAIT_COMPILING_CUDA_DOUBLE
#include "plait/kernels/cuda/kernels.hpp"
