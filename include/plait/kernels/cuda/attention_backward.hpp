#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/device/buffer.hpp"
#include "plait/kernels/cuda/attention_backend.hpp"
#include "plait/kernels/cuda/attention_backward_mma.hpp"
#include "plait/kernels/cuda/attention_scalar.hpp"

namespace plait::kernels {
namespace detail {

/// delta[b, h, i] = sum of o * d_o over the head's elements; one warp to a query of a head.
template <class T>
static __global__ void attention_delta(const T* o, const T* d_o, statistic_of<T>* delta, attention_sizes s) {
  using A = arithmetic<T>;
  const std::int64_t rows = static_cast<std::int64_t>(s.batch) * s.q_len * s.heads;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / warp_lanes);
  for (std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_lanes; row < rows;
       row += warps) {
    const std::int64_t token = row / s.heads, first = row % s.heads * s.head_dim;
    const T *const output = o + token * s.o_stride + first, *const gradient = d_o + token * s.do_stride + first;
    A sum = A(0);
    for (int c = warp_lane(); c < s.head_dim; c += warp_lanes) sum += load_as<A>(output + c) * load_as<A>(gradient + c);
    sum = warp_sum(sum);
    if (warp_lane() == 0) delta[(token / s.q_len * s.heads + row % s.heads) * s.q_len + token % s.q_len] = sum;
  }
}

}  // namespace detail

/// Gradients of attention from its inputs, its output o, its lse and the gradient of o; the probabilities are made anew
/// block by block from lse. o and lse may come from attention over more keys than these (ring attention): then the
/// results are these keys' share of dq and the dk, dv of these keys. Every sum has one order, so equal inputs give
/// equal bits. Demands on the shape as for `attention_forward`.
template <class T>
void attention_backward(cuda& device, const T* q, const T* k, const T* v, const T* o, const statistic_of<T>* lse,
                        const T* d_o, T* dq, T* dk, T* dv, const attention_shape& shape,
                        attention_accumulate accumulate, const attention_choice& choice) {
  const attention_shape s = shape.checked();
  const detail::attention_sizes sizes(s);
  if constexpr (std::is_same_v<T, bf16>) detail::require_vectors(s, q, k, v, o, d_o, dq, dk, dv);
  if (sizes.batch == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    if (sizes.q_len > 0 && attention_backend_for(choice, s, dtype::bf16, accumulate) == attention_backend::cudnn) {
      return choice.library->backward(device, q, k, v, o, lse, d_o, dq, dk, dv, s);
    }
  }
  const std::int64_t rows = static_cast<std::int64_t>(sizes.batch) * sizes.q_len * sizes.heads;
  auto delta = make_buffer<statistic_of<T>>(device, static_cast<std::size_t>(rows));
  auto* const row_delta = delta.template data<statistic_of<T>>();
  if (rows > 0) {
    plait::detail::launch(device, {plait::detail::blocks_for(rows, 8), 256}, detail::attention_delta<T>, o, d_o,
                          row_delta, sizes);
  }
  detail::with_head_width(sizes.head_dim, [&](auto width) {
    detail::launch_attention_backward<decltype(width)::value>(
        device, q, k, v, lse, d_o, static_cast<const statistic_of<T>*>(row_delta), dq, dk, dv, sizes, accumulate);
  });
}

/// The same with the device's choice.
template <class T>
void attention_backward(cuda& device, const T* q, const T* k, const T* v, const T* o, const statistic_of<T>* lse,
                        const T* d_o, T* dq, T* dk, T* dv, const attention_shape& shape,
                        attention_accumulate accumulate = {}) {
  attention_backward(device, q, k, v, o, lse, d_o, dq, dk, dv, shape, accumulate, attention_choice_of(device));
}

}  // namespace plait::kernels
