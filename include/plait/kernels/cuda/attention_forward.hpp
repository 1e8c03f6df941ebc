// Attention on a GPU, as callers use it: checks, the choice of backend, and the launch. Kernels are in
// kernels/cuda/attention_forward_mma.hpp for bf16 and kernels/cuda/attention_scalar.hpp for float and double; results
// over different keys are merged by kernels/cuda/merge_lse.hpp. Test: tests/cuda/attention.cu.
#pragma once

#include <type_traits>

#include "plait/kernels/cuda/attention_backend.hpp"
#include "plait/kernels/cuda/attention_forward_mma.hpp"
#include "plait/kernels/cuda/attention_scalar.hpp"
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
                       const attention_shape& shape, const attention_choice& choice) {
  const attention_shape s = shape.checked();
  const detail::attention_sizes sizes(s);
  if constexpr (std::is_same_v<T, bf16>) detail::require_vectors(s, q, k, v, o);
  if (sizes.batch == 0 || sizes.q_len == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    if (attention_backend_for(choice, s, {.statistics = !std::is_same_v<O, T>}) == attention_backend::cudnn) {
      if constexpr (std::is_same_v<O, T>) return choice.library->forward(device, q, k, v, o, lse, s);
    }
  }
  detail::with_head_width(sizes.head_dim, [&](auto width) {
    detail::launch_attention_forward<decltype(width)::value>(device, q, k, v, o, lse, sizes);
  });
}

/// Uses the device's choice.
template <class T, attention_result<T> O>
void attention_forward(cuda& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape) {
  attention_forward(device, q, k, v, o, lse, shape, attention_choice_of(device));
}

}  // namespace plait::kernels
