// The launches of kernels/cuda/attention_backward.hpp, which includes this where CUDA is compiled, and the kernel of
// delta.
#pragma once

#include <algorithm>
#include <type_traits>

#include "plait/core/macros_off.hpp"
#include "plait/device/buffer.hpp"
#include "plait/kernels/cuda/attention_backward_mma.hpp"
#include "plait/kernels/cuda/attention_forward_mma.hpp"
#include "plait/kernels/cuda/attention_library.hpp"
#include "plait/kernels/cuda/attention_scalar.hpp"
#include "plait/kernels/cuda/chunk.hpp"

namespace plait::kernels {

namespace detail {

/// delta[b, h, i] = sum of o * d_o over the head's elements; `lanes` neighbouring threads to a query of a head, each
/// with `Width` of its numbers at a time.
template <int Width, class T, class O>
static __global__ void attention_delta_rows(const O* o, const T* d_o, statistic_of<T>* delta, attention_sizes s,
                                            int lanes) {
  using A = arithmetic<T>;
  const std::int64_t rows = static_cast<std::int64_t>(s.batch) * s.q_len * s.heads;
  const int groups = static_cast<int>(blockDim.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * groups;
  for (std::int64_t start = first; start < rows; start += static_cast<std::int64_t>(gridDim.x) * groups) {
    const std::int64_t row = start + static_cast<int>(threadIdx.x) / lanes;
    const bool inside = row < rows;  // a warp adds together
    const int i = static_cast<int>(row / s.heads % s.q_len), b = static_cast<int>(row / s.heads / s.q_len);
    const int head = static_cast<int>(row % s.heads);
    A sum = A(0);
    if (inside) {
      const O* const output = s.query_head(o, b, head, s.o_stride) + i * s.o_stride;
      const T* const gradient = s.query_head(d_o, b, head, s.do_stride) + i * s.do_stride;
      for (int c = lane * Width; c < s.head_dim; c += lanes * Width) {
        const chunk<Width, O> y = load_chunk<Width>(output + c);
        const chunk<Width, T> dy = load_chunk<Width>(gradient + c);
        PLAIT_UNROLL
        for (int j = 0; j < Width; ++j) sum += number<A>(y.at[j]) * number<A>(dy.at[j]);
      }
    }
    sum = lane_sum(sum, lanes);
    if (inside && lane == 0) s.statistics(delta, b, head)[i] = sum;
  }
}

}  // namespace detail

template <class T, attention_result<T> O>
void attention_delta(cuda& device, const O* o, const T* d_o, statistic_of<T>* delta, const attention_shape& shape) {
  const detail::attention_sizes sizes(shape.checked());
  const std::int64_t rows = static_cast<std::int64_t>(sizes.batch) * sizes.q_len * sizes.heads;
  if (rows == 0) return;
  constexpr unsigned threads = 256;
  constexpr int widest = detail::chunk_width<T, O>();
  const bool vectors = aligned16(o, d_o) && sizes.head_dim % widest == 0 && sizes.o_stride % vector16<O>::size == 0 &&
                       sizes.do_stride % vector16<T>::size == 0;
  detail::with_chunk<widest>(vectors, [&](auto width) {
    constexpr int Width = decltype(width)::value;
    const int lanes = lanes_for(sizes.head_dim, Width);
    plait::detail::launch(device, {plait::detail::blocks_for(rows, threads / static_cast<unsigned>(lanes)), threads},
                          detail::attention_delta_rows<Width, T, O>, o, d_o, delta, sizes, lanes);
  });
}

template <class T, attention_result<T> O, attention_result<T> G>
void attention_backward(cuda& device, const T* q, const T* k, const T* v, const O* o, const statistic_of<T>* lse,
                        const T* d_o, G* dq, G* dk, G* dv, const attention_shape& shape,
                        attention_accumulate accumulate, const statistic_of<T>* delta, const attention_choice& choice) {
  const attention_shape s = shape.checked();
  const detail::attention_sizes sizes(s);
  if constexpr (std::is_same_v<T, bf16>) detail::require_vectors(s, q, k, v, o, d_o, dq, dk, dv);
  if (sizes.batch == 0) return;
  if constexpr (std::is_same_v<T, bf16>) {
    const attention_request request{.gradients = true,
                                    .accumulate = accumulate,
                                    .float_output = !std::is_same_v<O, T>,
                                    .float_gradients = !std::is_same_v<G, T>,
                                    .has_output = o != nullptr};
    if (attention_backend_for(choice, s, request) == attention_backend::cudnn)
      return detail::library_backward(device, *choice.library, q, k, v, o, lse, d_o, dq, dk, dv, s, request);
  }
  buffer<cuda> made;
  if (delta == nullptr) {
    made = make_buffer<statistic_of<T>>(device, static_cast<std::size_t>(s.batch * s.heads * s.lse_stride));
    attention_delta(device, o, d_o, made.template data<statistic_of<T>>(), s);
    delta = made.template data<statistic_of<T>>();
  }
  detail::with_head_width(sizes.head_dim, [&](auto width) {
    detail::launch_attention_backward<decltype(width)::value>(device, q, k, v, lse, d_o, delta, dq, dk, dv, sizes,
                                                              accumulate);
  });
}

#ifndef PLAIT_COMPILED_CUDA
PLAIT_CUDA_INLINE std::size_t attention_shared_bytes(dtype type, std::int64_t head_dim) {
  std::size_t most = 0;
  detail::with_head_width(static_cast<int>(head_dim), [&](auto width) {
    constexpr int w = decltype(width)::value;
    using detail::scalar_backward_tiles, detail::scalar_forward_tiles;
    switch (type) {
      case dtype::bf16:
        most = std::max(detail::forward_tiles<w>::shared_bytes, detail::backward_tiles<w>::key_shared_bytes);
        break;
      case dtype::f64:
        most = std::max(scalar_forward_tiles<double, w>::shared_bytes, scalar_backward_tiles<double, w>::shared_bytes);
        break;
      default:
        most = std::max(scalar_forward_tiles<float, w>::shared_bytes, scalar_backward_tiles<float, w>::shared_bytes);
    }
  });
  return most;
}
#endif

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
