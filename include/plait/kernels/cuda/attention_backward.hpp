// The gradients of attention on a GPU, as callers use them: checks, the choice of backend, delta, and the launch.
// Kernels are in kernels/cuda/attention_backward_mma.hpp for bf16 and kernels/cuda/attention_scalar.hpp for float and
// double. Test: tests/cuda/attention.cpp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plait/core/compiled.hpp"
#include "plait/core/dtype.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
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
/// d_o; null has it made here. Where it is given, plait's kernels do not read o, which may be null, and a library does.
/// O, the type of o, and G, that of the gradients, are T or statistic_of<T>. Every sum has one order, so equal inputs
/// give equal bits. Demands on the shape as for `attention_forward`.
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

/// The shared memory, in bytes of a block, that plait's own kernels of attention and its gradients need for `type`
/// activations. GPUs have 99 KB (8.6, 8.9, 12.0), 163 KB (8.0) or 227 KB (9.0, 10.0) to give.
std::size_t attention_shared_bytes(dtype type, std::int64_t head_dim);

/// Refuses a model whose attention this GPU cannot run, when the model is made and not in its first step. What plait's
/// kernels have no room for, the device's library may run, if it does so for a plain shape of this head_dim; of masks
/// and strides, the launch decides.
inline void require_attention(const cuda& device, dtype type, std::int64_t head_dim) {
  const attention_choice& choice = device.attention();
  const bool asks = type == dtype::bf16 && choice.library != nullptr && choice.backend != attention_backend::own;
  const bool forced = asks && choice.backend == attention_backend::cudnn;
  const std::size_t needed = attention_shared_bytes(type, head_dim), there = device.shared_bytes_per_block();
  if (asks && (forced || needed > there)) {
    attention_shape plain;
    plain.q_len = plain.k_len = 128;
    plain.head_dim = head_dim;
    if (choice.library->supports(plain.checked(), type)) return;
    if (forced)
      fail({"attention: cuDNN is chosen, but does not support head_dim = ", head_dim,
            "; choose attention_backend::automatic or own"});
  }
  if (needed > there)
    fail({"attention: head_dim = ", head_dim, " in ", name_of(type), " needs ", needed,
          " bytes of shared memory, of which a block on GPU ", device.index(), " (", device.name(), ") has ", there,
          asks ? ", and the device's attention_library does not support it" : "", "; use a smaller head_dim, ",
          asks ? "" : "an attention_library such as cuDNN's, ", "or a GPU with more"});
}

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/attention_backward.ipp"
#endif

#include "plait/core/macros_on.hpp"
