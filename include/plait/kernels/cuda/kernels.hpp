// Every CUDA kernel, in files that compile kernels; other files get the launchers, which plait::compiled_cuda provides.
// Layers include kernels/kernels.hpp, which includes this header. cuDNN's attention is in
// kernels/cuda/attention_cudnn.hpp.
#pragma once

#include "plait/core/compiled.hpp"
#include "plait/kernels/cuda/launchers.hpp"

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/attention.hpp"
#include "plait/kernels/cuda/cross_entropy.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
#include "plait/kernels/cuda/embedding.hpp"
#include "plait/kernels/cuda/experts/router.hpp"
#include "plait/kernels/cuda/experts/rows.hpp"
#include "plait/kernels/cuda/norms.hpp"
#include "plait/kernels/cuda/optimizer.hpp"
#include "plait/kernels/cuda/random.hpp"
#include "plait/kernels/cuda/reductions.hpp"
#elif defined(__CUDACC__)
#include "plait/kernels/cuda/attention_kernels.hpp"  // the kernels for a mask's rule are compiled where the rule is
#endif
