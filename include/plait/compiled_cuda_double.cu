// The kernels of compiled_cuda.cu that compute in double, for checks of layouts. They are in a separate file, so that
// both compile at the same time.
#define PLAIT_COMPILING_CUDA_DOUBLE
#include "plait/compiled_cuda.cu"
