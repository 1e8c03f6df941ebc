// The includes of examples/cuda_mlp/parallel.cu.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "plait/comm/typed.hpp"
#include "plait/layout/apply.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/norm.hpp"
#include "plait/tensor/nccl_attach.hpp"
