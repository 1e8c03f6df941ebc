// The kernels and launches of kernels/cuda/merge_lse.hpp, which includes this where CUDA is compiled.
#pragma once

#include <cmath>

#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/chunk.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels {

namespace detail {

/// `lanes` neighbouring threads for each (batch, query, head), each with `Width` of its numbers at a time.
template <int Width, class T, class Other>
__global__ static void merge_heads(T* o, statistic_of<T>* lse, const Other* o_other, const statistic_of<T>* lse_other,
                                   std::int64_t queries, std::int64_t q_len, std::int64_t heads, std::int64_t head_dim,
                                   std::int64_t o_stride, std::int64_t other_stride, std::int64_t q_batch,
                                   std::int64_t lse_stride, int lanes) {
  using S = statistic_of<T>;
  const std::int64_t group = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const std::int64_t query = group / heads, h = group % heads;
  const bool inside = query < queries;
  const std::int64_t at = inside ? (query / q_len * heads + h) * lse_stride + query % q_len : 0;
  const S before = inside ? lse[at] : S(0), other = inside ? lse_other[at] : S(0);
  __syncwarp();  // every lane has read lse before one overwrites it
  const S larger = before > other ? before : other;
  if (!inside || larger == -infinite<S>) return;
  const S mine = exp(before - larger), others = exp(other - larger);
  const S keep = mine / (mine + others), take = others / (mine + others);
  const std::int64_t token = query / q_len * q_batch + query % q_len;
  T* const target = o + token * o_stride + h * head_dim;
  const Other* const source = o_other + token * other_stride + h * head_dim;
  for (std::int64_t c = std::int64_t{lane} * Width; c < head_dim; c += std::int64_t{lanes} * Width) {
    chunk<Width, T> merged = load_chunk<Width>(target + c);
    const chunk<Width, Other> added = load_chunk<Width>(source + c);
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) {
      merged.at[j] = number<T>(number<S>(merged.at[j]) * keep + number<S>(added.at[j]) * take);
    }
    store_chunk(target + c, merged);
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
  constexpr int widest = detail::chunk_width<T, Other>();
  const bool vectors = aligned16(o, o_other) && s.head_dim % widest == 0 && s.o_stride % vector16<T>::size == 0 &&
                       other_stride % vector16<Other>::size == 0;
  detail::with_chunk<widest>(vectors, [&](auto width) {
    constexpr int Width = decltype(width)::value;
    const int lanes = lanes_for(s.head_dim, Width);
    plait::detail::launch(
        device, {plait::detail::blocks_for(queries * s.heads, threads / static_cast<unsigned>(lanes)), threads},
        detail::merge_heads<Width, T, Other>, o, lse, o_other, lse_other, queries, s.q_len, s.heads, s.head_dim,
        s.o_stride, other_stride, s.q_batch, s.lse_stride, lanes);
  });
}

}  // namespace plait::kernels
