// Every CUDA kernel. nvcc compiles them; other compilers see their declarations, for programs that link
// plait::compiled_cuda. Layers include kernels/kernels.hpp, which adds this; cuDNN's attention is not among them
// (kernels/cuda/attention_cudnn.hpp).
#pragma once

#include "plait/kernels/cuda/activations.hpp"
#include "plait/kernels/cuda/adamw.hpp"
#include "plait/kernels/cuda/adamw_rounded.hpp"
#include "plait/kernels/cuda/attention_backward.hpp"
#include "plait/kernels/cuda/attention_forward.hpp"
#include "plait/kernels/cuda/compiled.hpp"
#include "plait/kernels/cuda/copy.hpp"
#include "plait/kernels/cuda/cross_entropy.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
#include "plait/kernels/cuda/embedding.hpp"
#include "plait/kernels/cuda/layer_norm.hpp"
#include "plait/kernels/cuda/merge_lse.hpp"
#include "plait/kernels/cuda/muon.hpp"
#include "plait/kernels/cuda/random.hpp"
#include "plait/kernels/cuda/reductions.hpp"
#include "plait/kernels/cuda/rms_norm.hpp"
#include "plait/kernels/cuda/rope.hpp"
#include "plait/kernels/cuda/swiglu.hpp"
