// The kernels of compiled_cuda.cu that compute in double: checks of layouts do, training seldom. A file of its own,
// because two compile side by side.
#define PLAIT_COMPILING_CUDA_DOUBLE
#include "plait/compiled_cuda.cu"
