// Macros that compile code without user types in each file that includes it (the default), or once in a library. A
// program that links plait::compiled defines PLAIT_COMPILED. That library is compiled.cpp (PLAIT_COMPILING) and
// compiled_files.cpp (PLAIT_COMPILING_FILES); compiled_cuda.cu is the one for CUDA. PLAIT_COMPILED guards the code in
// headers and `.ipp` files (schedule/verify.ipp).
#pragma once

#include "plait/version.hpp"

#if defined(PLAIT_COMPILING) || defined(PLAIT_COMPILING_FILES)
#define PLAIT_INLINE
#else
#define PLAIT_INLINE inline
#endif

/// An instantiation that the library provides. Files that nvcc compiles use none, because nvcc compiles no CPU kernels.
/// Define large members outside of their class: compilers instantiate members inside a class again, for inlining.
#if defined(PLAIT_COMPILING)
#define PLAIT_COMPILED_TEMPLATE(...) template __VA_ARGS__;
#elif defined(PLAIT_COMPILED) && !defined(__CUDACC__)
#define PLAIT_COMPILED_TEMPLATE(...) extern template __VA_ARGS__;
#else
#define PLAIT_COMPILED_TEMPLATE(...)
#endif

/// Set where plait's CPU device is not available. nvcc compiles none of its kernels. A project without oneDNN and
/// OpenBLAS defines it for the files that it links with plait::compiled_cuda.
#if defined(__CUDACC__) && !defined(PLAIT_NO_CPU)
#define PLAIT_NO_CPU
#endif

/// Set where CUDA kernels are compiled: by nvcc, and by the tests' CUDA runtime for machines without a GPU. It is not
/// set in programs that link plait::compiled_cuda. Other files see only the declarations of launchers.
#if (defined(__CUDACC__) || defined(PLAIT_CUDA_STAND_IN)) && !defined(PLAIT_COMPILED_CUDA)
#define PLAIT_CUDA_KERNELS
#endif

/// Marks a function that both GPU kernels and CPU code call.
#if defined(__CUDACC__)
#define PLAIT_HOST_DEVICE __host__ __device__
#else
#define PLAIT_HOST_DEVICE
#endif

/// Marks the definition of a launcher that is not a template.
#if defined(PLAIT_COMPILING_CUDA)
#define PLAIT_CUDA_INLINE
#else
#define PLAIT_CUDA_INLINE inline
#endif
