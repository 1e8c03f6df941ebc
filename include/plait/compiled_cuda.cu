// Programs that define PLAIT_COMPILED_CUDA link with this file, compiled_cuda_double.cu and compiled_cuda_sort.cu:
// they compile the CUDA kernels of plait once, with nvcc, for the architectures of those programs, whose own files any
// compiler may compile then. CMake's target is plait::compiled_cuda; without CMake, compile all three.
#undef PLAIT_COMPILED_CUDA  // which may be defined for all files of a program
#define PLAIT_COMPILING_CUDA
#include "plait/comm/threads/cuda.hpp"
#include "plait/kernels/cuda/kernels.hpp"
