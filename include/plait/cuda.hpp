// Layers and training on GPUs: the device, its kernels, in-process ranks on device memory, and steps as CUDA graphs.
// Include it in files that nvcc compiles, or in programs that link plait::compiled_cuda. For NCCL, include
// comm/launch/nccl.hpp, or tensor/nccl_attach.hpp for an existing `ncclComm_t`.
#pragma once

#include "plait/core/compiled.hpp"

#if !defined(PLAIT_CUDA_KERNELS) && !defined(PLAIT_COMPILED_CUDA)
#error \
    "plait: the kernels of layers on GPUs are neither compiled here nor elsewhere: let nvcc compile this file, or define PLAIT_COMPILED_CUDA and link with include/plait/compiled_cuda*.cu (CMake: plait::compiled_cuda)"
#endif

#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#include "plait/parallel/graph_step.hpp"
#include "plait/train.hpp"
