// The launches of kernels/cuda/attention_forward.hpp, which includes this where CUDA is compiled.
#pragma once

#include <type_traits>

#include "plait/kernels/cuda/attention_forward_mma.hpp"
#include "plait/kernels/cuda/attention_library.hpp"
#include "plait/kernels/cuda/attention_scalar.hpp"

namespace plait::kernels {

template <class T, attention_result<T> O>
void attention_forward(cuda& device, const T* q, const T* k, const T* v, O* o, statistic_of<T>* lse,
                       const attention_shape& shape, const attention_choice& choice) {
  const attention_shape s = shape.checked();
  const detail::attention_sizes sizes(s);
  if constexpr (std::is_same_v<T, bf16>) detail::require_vectors(s, q, k, v, o);
  if (sizes.batch == 0 || sizes.q_len == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    const attention_request request{.float_output = !std::is_same_v<O, T>};
    if (attention_backend_for(choice, s, request) == attention_backend::cudnn)
      return detail::library_forward(device, *choice.library, q, k, v, o, lse, s, request);
  }
  detail::with_head_width(sizes.head_dim, [&](auto width) {
    detail::launch_attention_forward<decltype(width)::value>(device, q, k, v, o, lse, sizes);
  });
}

}  // namespace plait::kernels
