#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "plait/kernels/cuda/attention_forward_mma.hpp"
#include "plait/kernels/cuda/attention_scalar.hpp"

namespace plait::kernels {

/// Attention in blocks, scores never in memory: on tensor cores for bf16 (head_dim and strides multiples of 8, arrays
/// on 16-byte boundaries), with plain multiply-adds for float and double. Writes o (0 for queries that see nothing) and
/// lse [batch, heads, q_len], the natural logarithm of the sum of the exponentials of the scaled scores. head_dim is at
/// most 256; throws `plait::error` for a shape that cannot be.
template <class T>
void attention_forward(cuda& device, const T* q, const T* k, const T* v, T* o, statistic_of<T>* lse,
                       const attention_shape& shape) {
  const attention_shape s = shape.checked();
  const detail::attention_sizes sizes(s);
  if constexpr (std::is_same_v<T, bf16>) detail::require_vectors(s, q, k, v, o);
  if (sizes.batch == 0 || sizes.q_len == 0) return;
  detail::with_head_width(sizes.head_dim, [&](auto width) {
    detail::launch_attention_forward<decltype(width)::value>(device, q, k, v, o, lse, sizes);
  });
}

namespace detail {

/// One warp to a query of a head.
template <class T>
static __global__ void merge_lse_rows(T* o, statistic_of<T>* lse, const T* o_other, const statistic_of<T>* lse_other,
                                      std::int64_t other_stride, attention_sizes s) {
  using A = arithmetic<T>;
  constexpr A nothing = -std::numeric_limits<A>::infinity();
  const std::int64_t rows = static_cast<std::int64_t>(s.batch) * s.q_len * s.heads;
  const std::int64_t warps = static_cast<std::int64_t>(gridDim.x) * (blockDim.x / warp_lanes);
  for (std::int64_t row = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_lanes; row < rows;
       row += warps) {
    const std::int64_t token = row / s.heads;
    const int head = static_cast<int>(row % s.heads), b = static_cast<int>(token / s.q_len);
    const std::int64_t at = (static_cast<std::int64_t>(b) * s.heads + head) * s.q_len + token % s.q_len;
    const A mine = lse[at], others = lse_other[at], larger = mine < others ? others : mine;
    if (larger == nothing) continue;
    const A keep = precise_exp(mine - larger), take = precise_exp(others - larger), sum = keep + take;
    T* const target = o + token * s.o_stride + static_cast<std::int64_t>(head) * s.head_dim;
    const T* const source = o_other + token * other_stride + static_cast<std::int64_t>(head) * s.head_dim;
    for (int c = warp_lane(); c < s.head_dim; c += warp_lanes) {
      store_as(target + c, load_as<A>(target + c) * (keep / sum) + load_as<A>(source + c) * (take / sum));
    }
    __syncwarp();
    if (warp_lane() == 0) lse[at] = larger + precise_log(sum);
  }
}

}  // namespace detail

/// Combines the attention of the same queries over two disjoint sets of keys: o and lse become what attention over both
/// would have given, from o, lse of one set and o_other, lse_other of the other. Uses batch, q_len, heads, head_dim and
/// o_stride (of o) of the shape; `other_stride` is the stride of o_other.
template <class T>
void merge_lse(cuda& device, T* o, statistic_of<T>* lse, const T* o_other, const statistic_of<T>* lse_other,
               std::int64_t other_stride, const attention_shape& shape) {
  const detail::attention_sizes sizes(shape.checked());
  const std::int64_t rows = static_cast<std::int64_t>(sizes.batch) * sizes.q_len * sizes.heads;
  if (rows == 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(rows, 8), 256}, detail::merge_lse_rows<T>, o, lse, o_other,
                        lse_other, other_stride, sizes);
}

}  // namespace plait::kernels
