// The kernels of compiled_cuda.cu that compute in double: checks of layouts do, training rarely does. It is a
// file of its own, because two compile at once.
#define PLAIT_COMPILING_CUDA_DOUBLE
#include "plait/compiled_cuda.cu"
