// Maps and sums over the rows of matrices on a GPU. The threads of a block's first dimension share a row, chunk by
// chunk; narrow rows have one warp each and several to a block (its second dimension), and wider ones a block. Sums of
// columns are in kernels/cuda/column_sums.hpp.
#pragma once

#include <cstdint>

#include "plait/kernels/cuda/chunk.hpp"

namespace plait::kernels::detail {

/// The chunks of a row that a thread can hold in registers; those beyond are read again.
inline constexpr int held_chunks = 4;
/// Most threads of a block of these kernels, which leaves each 128 registers.
inline constexpr int most_row_threads = 512;

/// Blocks of rows of `columns` elements: as many threads to a row as hold it, if that is not more than `most`.
template <int Width>
dim3 row_block(std::int64_t columns, std::int64_t most = most_row_threads) {
  const std::int64_t chunks = (columns + Width - 1) / Width;
  const std::int64_t threads = (chunks + held_chunks - 1) / held_chunks;
  const std::int64_t warps = threads <= 32 ? 1 : (threads < most ? threads + 31 : most) / 32;
  return dim3(static_cast<unsigned>(32 * warps), warps == 1 ? 4 : 1);
}

/// The rows of this block's second dimension, and the step to its next ones.
__device__ inline std::int64_t first_row() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }
__device__ inline std::int64_t row_step() { return static_cast<std::int64_t>(gridDim.x) * blockDim.y; }

/// The sum over the threads of a row, on each of them; `scratch` is shared memory for 32 values. Where a row has more
/// than a warp, the block has only that row.
template <class S>
__device__ inline S row_sum(S value, S* scratch) {
  return blockDim.x == warp_lanes ? warp_sum(value) : block_sum(value, scratch);
}

/// Calls f(column) for each chunk of this thread.
template <int Width, class F>
__device__ inline void each_chunk(std::int64_t columns, F f) {
  PLAIT_UNROLL_BY(4)
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * Width; c < columns;
       c += static_cast<std::int64_t>(blockDim.x) * Width) {
    f(c);
  }
}

/// This thread's chunks of a row, loaded once.
template <int Width, class T>
struct held_row {
  const T* row = nullptr;
  chunk<Width, T> held[held_chunks];

  /// Row r of a matrix; nothing beyond the last one.
  __device__ void load(const T* matrix, std::int64_t r, std::int64_t rows, std::int64_t columns) {
    if (r >= rows) return;
    row = matrix + r * columns;
    PLAIT_UNROLL
    for (int k = 0; k < held_chunks; ++k) {
      const std::int64_t c = column_of(k);
      if (c < columns) held[k] = load_chunk<Width>(row + c);
    }
  }
  static __device__ std::int64_t column_of(int k) {
    return (static_cast<std::int64_t>(k) * blockDim.x + threadIdx.x) * Width;
  }
};

/// Calls f(column, k, chunk_0, chunk_1, ...) for each of this thread's chunks of some rows; k counts them. What is not
/// held is read again; `Held` promises that there is nothing of the kind.
template <int Width, bool Held, class F, class... T>
__device__ inline void each_held(std::int64_t columns, F f, const held_row<Width, T>&... rows) {
  PLAIT_UNROLL
  for (int k = 0; k < held_chunks; ++k) {
    const std::int64_t c = (static_cast<std::int64_t>(k) * blockDim.x + threadIdx.x) * Width;
    if (c < columns) f(c, k, rows.held[k]...);
  }
  if constexpr (!Held) {
    int k = held_chunks;
    for (std::int64_t c = (static_cast<std::int64_t>(k) * blockDim.x + threadIdx.x) * Width; c < columns;
         c += static_cast<std::int64_t>(blockDim.x) * Width, ++k) {
      f(c, k, load_chunk<Width>(rows.row + c)...);
    }
  }
}

// ---- element by element, with a number or two per row ------------------------------------------------------------

// Told that two blocks are enough, ptxas spills nothing for the sake of a third.
template <int Width, class Op>
static __global__ void __launch_bounds__(most_row_threads, 2)
    row_map_kernel(Op op, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t r = first_row(); r < rows; r += row_step()) {
    const auto numbers = op.row(r);
    each_chunk<Width>(columns, [&](std::int64_t c) { op.template at<Width>(r, c, numbers); });
  }
}

/// op.at<Width>(r, c, op.row(r)) for each chunk, which begins at column c of row r.
template <int Width, class Op>
void row_map(cuda& device, bool vectors, std::int64_t rows, std::int64_t columns, Op op) {
  if (rows <= 0 || columns <= 0) return;
  with_chunk<Width>(vectors, [&](auto width) {
    constexpr int n = decltype(width)::value;
    const dim3 block = row_block<n>(columns);
    plait::detail::launch(device, {plait::detail::blocks_for(rows, block.y), block}, row_map_kernel<n, Op>, op, rows,
                          columns);
  });
}

// ---- sums of rows ------------------------------------------------------------------------------------------------

template <int Width, class Term, class S>
static __global__ void __launch_bounds__(most_row_threads, 1)
    row_sums_kernel(Term term, S* out, std::int64_t rows, std::int64_t columns) {
  __shared__ S scratch[warp_lanes];
  for (std::int64_t r = first_row(); r < rows; r += row_step()) {
    const auto numbers = term.row(r);
    S sums[Term::outputs] = {};
    each_chunk<Width>(columns, [&](std::int64_t c) { term.template add<Width>(r, c, numbers, sums); });
    PLAIT_UNROLL
    for (int i = 0; i < Term::outputs; ++i) {
      const S sum = row_sum(sums[i], scratch);
      if (threadIdx.x == 0) out[r * Term::outputs + i] = sum;
    }
  }
}

/// out[r, i] = the sum over the columns of what term.add<Width>(r, c, term.row(r), sums) adds to sums[i] for a chunk.
template <int Width, class Term, class S>
void row_sums_of(cuda& device, bool vectors, std::int64_t rows, std::int64_t columns, Term term, S* out) {
  if (rows <= 0) return;
  with_chunk<Width>(vectors, [&](auto width) {
    constexpr int n = decltype(width)::value;
    const dim3 block = row_block<n>(columns);
    plait::detail::launch(device, {plait::detail::blocks_for(rows, block.y), block}, row_sums_kernel<n, Term, S>, term,
                          out, rows, columns);
  });
}

}  // namespace plait::kernels::detail
