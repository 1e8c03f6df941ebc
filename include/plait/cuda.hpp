// Layers and training on GPUs, for files that nvcc compiles: the device, its kernels, in-process ranks on device
// memory, and steps as CUDA graphs. NCCL is apart: comm/launch/nccl.hpp, and interop/nccl_attach.hpp for an existing
// `ncclComm_t`.
#pragma once

#include "plait/comm/threads/cuda.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_graph.hpp"
#include "plait/train.hpp"
#include "plait/train/graph_step.hpp"
