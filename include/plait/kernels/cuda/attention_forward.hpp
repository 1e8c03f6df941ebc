// Attention on a GPU, as callers use it: checks, the choice of backend, and the launch. Kernels are in
// kernels/cuda/attention_forward_mma.hpp for bf16 and kernels/cuda/attention_scalar.hpp for float and double; results
// over different keys are merged by kernels/cuda/merge_lse.hpp. Test: tests/cuda/attention.cpp.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/attention_shape.hpp"
#include "plait/kernels/cuda/attention_backend.hpp"
#include "plait/kernels/cuda/merge_lse.hpp"

namespace plait::kernels {

/// Attention in blocks, scores never in memory: on tensor cores for bf16 (head_dim and strides multiples of 8, arrays
/// on 16-byte boundaries), with plain multiply-adds for float and double. Writes o (0 for queries that see nothing) and
/// lse [batch, heads, q_len], the natural logarithm of the sum of the exponentials of the scaled scores. The work is in
/// proportion to the pairs that see each other. O is T or statistic_of<T>.
/// head_dim is at most 256; throws `plait::error` for a shape that cannot be. `choice` says whose kernels run bf16, see
/// `attention_backend_for`.
template <class T, attention_result<T> O>
void attention_forward(cuda& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape, const attention_choice& choice);

/// Uses the device's choice.
template <class T, attention_result<T> O>
void attention_forward(cuda& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape) {
  attention_forward(device, q, k, v, o, lse, shape, attention_choice_of(device));
}

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/attention_forward.ipp"
#endif
