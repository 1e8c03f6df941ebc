#pragma once

/// Every CUDA kernel; see plait/kernels/kernels.hpp.
#include "plait/kernels/cuda/math.hpp"
