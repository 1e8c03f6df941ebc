// Macros that choose how code that names no user's type is compiled: with every file that includes it (the default), or
// once, in a library. A program that links plait::compiled defines PLAIT_COMPILED; that library is compiled.cpp and
// compiled_files.cpp, which define PLAIT_COMPILING and PLAIT_COMPILING_FILES; CUDA's is compiled_cuda.cu. The code is
// behind PLAIT_COMPILED in a header, or in its `.ipp` (schedule/verify.ipp), and in instantiations.
#pragma once

#include "plait/version.hpp"

#if defined(PLAIT_COMPILING) || defined(PLAIT_COMPILING_FILES)
#define PLAIT_INLINE
#else
#define PLAIT_INLINE inline
#endif

/// An instantiation that the library provides. nvcc compiles no kernel of the processor, so its files take none. Large
/// members are defined outside of their class: compilers instantiate those inside, for inlining, although the library
/// has them.
#if defined(PLAIT_COMPILING)
#define PLAIT_COMPILED_TEMPLATE(...) template __VA_ARGS__;
#elif defined(PLAIT_COMPILED) && !defined(__CUDACC__)
#define PLAIT_COMPILED_TEMPLATE(...) extern template __VA_ARGS__;
#else
#define PLAIT_COMPILED_TEMPLATE(...)
#endif

/// Set where the CPU is no device: nvcc compiles none of its kernels, and a project that has oneDNN and OpenBLAS
/// nowhere defines it for the files that it links with plait::compiled_cuda.
#if defined(__CUDACC__) && !defined(PLAIT_NO_CPU)
#define PLAIT_NO_CPU
#endif

/// Set where CUDA kernels are compiled: by nvcc, and by the tests' runtime for machines without a GPU, in programs that
/// do not link plait::compiled_cuda. Other files see the declarations of launchers alone.
#if (defined(__CUDACC__) || defined(PLAIT_CUDA_STAND_IN)) && !defined(PLAIT_COMPILED_CUDA)
#define PLAIT_CUDA_KERNELS
#endif

/// Before a function that kernels of GPUs call as well as code of the processor.
#if defined(__CUDACC__)
#define PLAIT_HOST_DEVICE __host__ __device__
#else
#define PLAIT_HOST_DEVICE
#endif

/// Before the definition of a launcher that is no template.
#if defined(PLAIT_COMPILING_CUDA)
#define PLAIT_CUDA_INLINE
#else
#define PLAIT_CUDA_INLINE inline
#endif
