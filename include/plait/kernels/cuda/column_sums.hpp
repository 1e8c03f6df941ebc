// Sums over the rows of a matrix on a GPU, in two steps and always in the same order: groups of rows into a scratch
// array, then the groups. It makes one sum for each column; those for each row are in kernels/cuda/rows.hpp. CUB has no
// such sums: it adds elements that follow one another, and computes no terms of several sums in one pass.
#pragma once

#include <algorithm>
#include <cstdint>

#include "plait/device/buffer.hpp"
#include "plait/kernels/cuda/chunk.hpp"

namespace plait::kernels::detail {

inline constexpr int column_block_rows = 8;

/// partial[i, group, c] of `outputs` sums; a block has 32 chunks of columns and every gridDim.y-th 8 rows.
template <int Width, class Term, class S>
static __global__ void column_sums_kernel(Term term, S* partial, std::int64_t rows, std::int64_t columns) {
  constexpr int tile = warp_lanes * Width;
  __shared__ S shared[column_block_rows * tile];
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * tile;
  const std::int64_t c = first + threadIdx.x * Width;
  S sums[Term::outputs][Width] = {};
  if (c < columns) {
    const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * column_block_rows;
    PLAIT_UNROLL_BY(2)
    for (std::int64_t r = static_cast<std::int64_t>(blockIdx.y) * column_block_rows + threadIdx.y; r < rows; r += step)
      term.template add<Width>(r, c, sums);
  }
  const int thread = static_cast<int>(threadIdx.y) * warp_lanes + static_cast<int>(threadIdx.x);
  PLAIT_UNROLL
  for (int i = 0; i < Term::outputs; ++i) {
    __syncthreads();
    PLAIT_UNROLL
    for (int j = 0; j < Width; ++j) shared[threadIdx.y * tile + threadIdx.x * Width + j] = sums[i][j];
    __syncthreads();
    for (int at = thread; at < tile && first + at < columns; at += warp_lanes * column_block_rows) {
      S sum = 0;
      PLAIT_UNROLL
      for (int row = 0; row < column_block_rows; ++row) sum += shared[row * tile + at];
      partial[(static_cast<std::int64_t>(i) * gridDim.y + blockIdx.y) * columns + first + at] = sum;
    }
  }
}

inline constexpr int finish_rows = 32;

/// out[c] += the sum of partial[group, c] over the groups, in double; a second output may be null.
template <class S, class G>
static __global__ void column_finish_kernel(const S* partial, G* first, G* second, std::int64_t groups,
                                            std::int64_t columns) {
  __shared__ double shared[finish_rows][warp_lanes];
  G* const out = blockIdx.y == 0 ? first : second;
  const S* const from = partial + blockIdx.y * groups * columns;
  const std::int64_t c = static_cast<std::int64_t>(blockIdx.x) * warp_lanes + threadIdx.x;
  double sum = 0;
  if (c < columns && out != nullptr) {
    PLAIT_UNROLL_BY(8)  // as many loads in flight: there are few blocks
    for (std::int64_t group = threadIdx.y; group < groups; group += finish_rows)
      sum += static_cast<double>(from[group * columns + c]);
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || c >= columns || out == nullptr) return;
  for (int row = 1; row < finish_rows; ++row) sum += shared[row][threadIdx.x];
  out[c] = static_cast<G>(static_cast<double>(out[c]) + sum);
}

template <class S, class G>
void finish_columns(cuda& device, const S* partial, G* first, G* second, std::int64_t groups, std::int64_t columns) {
  const dim3 grid(plait::detail::blocks_for(columns, warp_lanes), second == nullptr ? 1 : 2);
  plait::detail::launch(device, {grid, dim3(warp_lanes, finish_rows)}, column_finish_kernel<S, G>, partial, first,
                        second, groups, columns);
}

/// first[c] += and second[c] += the sums over the rows of what term.add<Width>(r, c, sums) adds to sums[0] and sums[1].
/// The order of the sums depends on the sizes and on `vectors` alone.
template <int Width, class Term, class G>
void add_column_sums_of(cuda& device, bool vectors, std::int64_t rows, std::int64_t columns, Term term, G* first,
                        G* second = nullptr) {
  if (rows <= 0 || columns <= 0) return;
  using S = typename Term::sum_type;
  with_chunk<Width>(vectors, [&](auto width) {
    constexpr int n = decltype(width)::value;
    constexpr std::int64_t blocks = 512;  // fill the largest GPUs
    const std::int64_t tiles = (columns + warp_lanes * n - 1) / (warp_lanes * n);
    const std::int64_t most = (rows + column_block_rows - 1) / column_block_rows;
    const std::int64_t groups = std::clamp((blocks + tiles - 1) / tiles, std::int64_t{1}, most);
    auto partial = make_buffer<S>(device, static_cast<std::size_t>(Term::outputs * groups * columns));
    plait::detail::launch(
        device,
        {dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(groups)), dim3(warp_lanes, column_block_rows)},
        column_sums_kernel<n, Term, S>, term, partial.template data<S>(), rows, columns);
    finish_columns(device, static_cast<const S*>(partial.template data<S>()), first, second, groups, columns);
  });
}

}  // namespace plait::kernels::detail
