// The kernels and launches of kernels/cuda/merge_lse.hpp, which includes this where CUDA is compiled.
#pragma once

#include <cmath>
#include <limits>

#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels {

namespace detail {

/// A warp for each (batch, query, head).
template <class T, class Other>
__global__ static void merge_heads(T* o, statistic_of<T>* lse, const Other* o_other, const statistic_of<T>* lse_other,
                                   std::int64_t queries, std::int64_t q_len, std::int64_t heads, std::int64_t head_dim,
                                   std::int64_t o_stride, std::int64_t other_stride, std::int64_t q_batch,
                                   std::int64_t lse_stride) {
  using S = statistic_of<T>;
  const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_lanes;
  const std::int64_t lane = threadIdx.x % warp_lanes;
  const std::int64_t query = warp / heads, h = warp % heads;
  if (query >= queries) return;
  const std::int64_t at = (query / q_len * heads + h) * lse_stride + query % q_len;
  const std::int64_t token = query / q_len * q_batch + query % q_len;
  const S before = lse[at], other = lse_other[at];
  __syncwarp();  // every lane has read lse before one overwrites it
  const S larger = before > other ? before : other;
  if (larger == -std::numeric_limits<S>::infinity()) return;
  const S mine = exp(before - larger), others = exp(other - larger);
  const S keep = mine / (mine + others), take = others / (mine + others);
  T* const target = o + token * o_stride + h * head_dim;
  const Other* const source = o_other + token * other_stride + h * head_dim;
  for (std::int64_t c = lane; c < head_dim; c += warp_lanes) {
    target[c] = number<T>(number<S>(target[c]) * keep + number<S>(source[c]) * take);
  }
  if (lane == 0) lse[at] = larger + log(mine + others);
}

}  // namespace detail

template <class T, class Other>
void merge_lse(cuda& device, T* o, statistic_of<T>* lse, const Other* o_other, const statistic_of<T>* lse_other,
               std::int64_t other_stride, const attention_shape& shape) {
  const attention_shape s = shape.checked();
  const std::int64_t queries = s.batch * s.q_len;
  if (queries == 0) return;
  constexpr unsigned threads = 256;
  plait::detail::launch(device, {plait::detail::blocks_for(queries * s.heads, threads / warp_lanes), threads},
                        detail::merge_heads<T, Other>, o, lse, o_other, lse_other, queries, s.q_len, s.heads,
                        s.head_dim, s.o_stride, other_stride, s.q_batch, s.lse_stride);
}

}  // namespace plait::kernels
