// Macros that unroll loops of CUDA kernels. For other compilers they are empty, as for those of the tests' stand-in
// (tests/stand_in/cuda).
#pragma once

#include "plait/version.hpp"

/// Unrolls the loop that follows; what lives in registers must be indexed by constants.
#ifdef __CUDACC__
#define PLAIT_UNROLL _Pragma("unroll")
#define PLAIT_UNROLL_BY(n) PLAIT_PRAGMA(unroll n)
#define PLAIT_PRAGMA(text) _Pragma(#text)
#else
#define PLAIT_UNROLL
#define PLAIT_UNROLL_BY(n)
#endif
