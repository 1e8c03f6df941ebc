// The gradients of attention on a GPU, as callers use them: checks, the choice of backend, delta, and the launch.
// Kernels are in kernels/cuda/attention_backward_mma.hpp for bf16 and kernels/cuda/attention_scalar.hpp for float and
// double. Test: tests/cuda/attention.cpp.
#pragma once

#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"
#include "plait/kernels/attention_shape.hpp"
#include "plait/kernels/cuda/attention_backend.hpp"

namespace plait::kernels {

/// delta [batch, heads, q_len] as lse lies: the sum of o * d_o over a head's elements, all that `attention_backward`
/// needs to know of o. Where that is called for one piece of the keys after another, this is made once. O is T or
/// statistic_of<T>.
template <class T, attention_result<T> O>
void attention_delta(cuda& device, const O* o, const T* d_o, statistic_of<T>* delta, const attention_shape& shape);

/// Gradients of attention from its inputs, its output o, its lse and the gradient of o; the probabilities are made anew
/// block by block from lse. o and lse may come from attention over more keys than these (ring attention): then the
/// results are these keys' share of dq and the dk, dv of these keys. `delta` is what `attention_delta` makes of o and
/// d_o; where it is given o is not read, null has it made here. O, the type of o, and G, that of the gradients, are T
/// or statistic_of<T>. Every sum has one order, so equal inputs give equal bits. Demands on the shape as for
/// `attention_forward`.
template <class T, attention_result<T> O, attention_result<T> G>
void attention_backward(cuda& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate, const statistic_of<T>* delta, const attention_choice& choice);

/// Uses the device's choice.
template <class T, attention_result<T> O, attention_result<T> G>
void attention_backward(cuda& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate = {}, const statistic_of<T>* delta = nullptr) {
  attention_backward(device, q, k, v, o, lse, d_o, dq, dk, dv, shape, accumulate, delta, attention_choice_of(device));
}

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/attention_backward.ipp"
#endif
