#pragma once

/// Every CUDA kernel; see plait/kernels/kernels.hpp.
#include "plait/kernels/cuda/adamw.hpp"
#include "plait/kernels/cuda/cross_entropy.hpp"
#include "plait/kernels/cuda/embedding.hpp"
#include "plait/kernels/cuda/merge_lse.hpp"
#include "plait/kernels/cuda/random.hpp"
#include "plait/kernels/cuda/reductions.hpp"
