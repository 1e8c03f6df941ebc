// How CUDA kernels walk over arrays: in chunks of 16 bytes, over rows and columns of a matrix, and over many tensors in
// one launch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

// ---- chunks of 16 bytes ------------------------------------------------------------------------------------------

/// Consecutive elements that one thread moves together: a multiple of 16 bytes in 16-byte accesses, or a single
/// element.
template <int Width, class T>
struct chunk {
  row_of<T, Width> at;
};

template <int Width, class T>
__device__ inline chunk<Width, T> load_chunk(const T* from) {
  chunk<Width, T> c;
  if constexpr (Width == 1) {
    c.at[0] = *from;
  } else {
    static_assert(Width % vector16<T>::size == 0);
    PLAIT_UNROLL
    for (int i = 0; i < Width; i += vector16<T>::size) {
      const vector16<T> v = load_vector(from + i);
      PLAIT_UNROLL
      for (int j = 0; j < vector16<T>::size; ++j) c.at[i + j] = v.at[j];
    }
  }
  return c;
}

template <int Width, class T>
__device__ inline void store_chunk(T* to, const chunk<Width, T>& c) {
  if constexpr (Width == 1) {
    *to = c.at[0];
  } else {
    PLAIT_UNROLL
    for (int i = 0; i < Width; i += vector16<T>::size) {
      vector16<T> v;
      PLAIT_UNROLL
      for (int j = 0; j < vector16<T>::size; ++j) v.at[j] = c.at[i + j];
      store_vector(to + i, v);
    }
  }
}

/// Returns the number of elements of a chunk that is a whole number of 16-byte accesses for every type of an operation.
template <class... T>
constexpr int chunk_width() {
  int most = 1;
  ((most = vector16<T>::size > most ? vector16<T>::size : most), ...);
  return most;
}

/// Calls f with the number of elements of a chunk as an `integral_constant`; 1 if 16-byte accesses are not possible.
template <int Width, class F>
void with_chunk(bool vectors, F&& f) {
  if (vectors) {
    f(std::integral_constant<int, Width>());
  } else {
    f(std::integral_constant<int, 1>());
  }
}

// ---- element by element ------------------------------------------------------------------------------------------

template <int Width, class F, class Out, class... In>
__device__ inline void map_chunk(F f, Out* y, const chunk<Width, In>&... in) {
  chunk<Width, Out> out;
  PLAIT_UNROLL
  for (int j = 0; j < Width; ++j) out.at[j] = number<Out>(f(number<arithmetic<In>>(in.at[j])...));
  store_chunk(y, out);
}

template <int Width, class F, class Out, class... In>
static __global__ void map_kernel(std::int64_t n, F f, Out* y, const In*... in) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x * Width;
  for (std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * Width; i < n; i += step) {
    if (i + Width <= n) {
      map_chunk<Width>(f, y + i, load_chunk<Width>(in + i)...);
    } else {
      for (std::int64_t j = i; j < n; ++j) map_chunk<1>(f, y + j, load_chunk<1>(in + j)...);
    }
  }
}

/// y[i] = f(in_0[i], in_1[i], ...), computed in the `arithmetic` of the inputs; y may be one of the inputs. CUB's
/// `DeviceTransform` would not be faster (memory limits both), and headers do not include CUB (`sort_pairs`).
template <class F, class Out, class... In>
void map(cuda& device, std::int64_t n, F f, Out* y, const In*... in) {
  if (n <= 0) return;
  constexpr unsigned threads = 256;
  with_chunk<chunk_width<Out, In...>()>(aligned16(y, in...), [&](auto width) {
    void (*const kernel)(std::int64_t, F, Out*, const In*...) = map_kernel<decltype(width)::value, F, Out, In...>;
    plait::detail::launch(device, {plait::detail::blocks_for(n, threads * decltype(width)::value), threads}, kernel, n,
                          f, y, in...);
  });
}

// ---- rows --------------------------------------------------------------------------------------------------------
//
// The threads of a block's first dimension share a row, chunk by chunk. Narrow rows have one warp each, and several
// rows share a block (its second dimension). A wider row has a block.

/// Calls f as `with_chunk` does, for rows of `columns` elements of T. Rows begin on 16-byte boundaries if `aligned`,
/// and if `columns` is a whole number of chunks.
template <class T, class F>
void with_row_chunk(bool aligned, std::int64_t columns, F&& f) {
  constexpr int width = vector16<T>::size;
  with_chunk<width>(aligned && columns % width == 0, f);
}

/// The most chunks of a row that a thread holds in registers. Further chunks are read again.
inline constexpr int held_chunks = 4;
/// The most threads of a block of these kernels, so that each thread has 128 registers.
inline constexpr int most_row_threads = 512;

/// Returns blocks for rows of `columns` elements: as many threads per row as can hold it, but at most `most`.
template <int Width>
dim3 row_block(std::int64_t columns, std::int64_t most = most_row_threads) {
  const std::int64_t chunks = (columns + Width - 1) / Width;
  const std::int64_t threads = (chunks + held_chunks - 1) / held_chunks;
  const std::int64_t warps = threads <= 32 ? 1 : (threads < most ? threads + 31 : most) / 32;
  return dim3(static_cast<unsigned>(32 * warps), warps == 1 ? 4 : 1);
}

/// The first row of this thread, and the step to its next rows.
__device__ inline std::int64_t first_row() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }
__device__ inline std::int64_t row_step() { return static_cast<std::int64_t>(gridDim.x) * blockDim.y; }

/// Returns the sum over the threads of a row to each of them; `scratch` is shared memory for 32 values. If a row has
/// more than one warp, the block has only that row.
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

  /// Loads row r of a matrix; loads nothing after the last row.
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

/// Calls f(column, k, chunk_0, chunk_1, ...) for each of this thread's chunks of some rows; k counts them. Chunks not
/// in registers are read again; `Held` promises that all are in registers.
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

// ---- element by element, with one or two numbers per row ---------------------------------------------------------

// The bound of two blocks keeps ptxas from spilling registers to fit a third block.
template <int Width, class Op>
static __global__ void __launch_bounds__(most_row_threads, 2)
    row_map_kernel(Op op, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t r = first_row(); r < rows; r += row_step()) {
    const auto numbers = op.row(r);
    each_chunk<Width>(columns, [&](std::int64_t c) { op.template at<Width>(r, c, numbers); });
  }
}

/// Calls op.at<Width>(r, c, op.row(r)) for each chunk; it begins at column c of row r.
template <class T, class Op>
void row_map(cuda& device, bool aligned, std::int64_t rows, std::int64_t columns, Op op) {
  if (rows <= 0 || columns <= 0) return;
  with_row_chunk<T>(aligned, columns, [&](auto width) {
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

/// out[r, i] = the sum over the columns of the terms that term.add<Width>(r, c, term.row(r), sums) adds to sums[i] for
/// a chunk.
template <class T, class Term, class S>
void row_sums_of(cuda& device, bool aligned, std::int64_t rows, std::int64_t columns, Term term, S* out) {
  if (rows <= 0) return;
  with_row_chunk<T>(aligned, columns, [&](auto width) {
    constexpr int n = decltype(width)::value;
    const dim3 block = row_block<n>(columns);
    plait::detail::launch(device, {plait::detail::blocks_for(rows, block.y), block}, row_sums_kernel<n, Term, S>, term,
                          out, rows, columns);
  });
}

// ---- sums of columns ---------------------------------------------------------------------------------------------
//
// They take two steps, always in one order: groups of rows into a scratch array, then the groups. CUB has no such sums:
// it adds consecutive elements, and does not compute several sums in one pass.

inline constexpr int column_block_rows = 8;

/// Writes partial[i, group, c] of `outputs` sums. A block has 32 chunks of columns and every gridDim.y-th group of 8
/// rows.
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
    PLAIT_UNROLL_BY(8)  // as many loads in flight, because there are few blocks
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

/// first[c] and second[c] += the sums over the rows of the terms that term.add<Width>(r, c, sums) adds to sums[0] and
/// sums[1]. The order of the sums depends only on the sizes and on `aligned`.
template <class T, class Term, class G>
void add_column_sums_of(cuda& device, bool aligned, std::int64_t rows, std::int64_t columns, Term term, G* first,
                        G* second = nullptr) {
  if (rows <= 0 || columns <= 0) return;
  using S = typename Term::sum_type;
  with_row_chunk<T>(aligned, columns, [&](auto width) {
    constexpr int n = decltype(width)::value;
    constexpr std::int64_t blocks = 512;  // enough for the largest GPUs
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

// ---- many tensors in one launch ----------------------------------------------------------------------------------
//
// The table of tensors is a kernel parameter, so it needs no allocation or copy. Every block takes one chunk of one
// tensor.

/// N elements of T that one instruction moves.
template <class T, int N>
struct alignas(N * sizeof(T)) element_pack {
  row_of<T, N> at;
};

/// Whether `pointer` is aligned for packs of N elements.
template <int N, class T>
__device__ inline bool holds_packs(const T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % (N * sizeof(T)) == 0;
}

/// Programs for every driver of CUDA 12 have at most 4 KiB of kernel parameters. The table leaves some of it for
/// others.
inline constexpr int table_bytes = 3900;

/// A table of tensors. `Entry` has a member `size`. Entry i has the chunks first_chunk[i] ... first_chunk[i + 1] - 1 of
/// the launch.
template <class Entry>
struct tensor_table {
  static constexpr int room = (table_bytes - 16) / static_cast<int>(sizeof(Entry) + sizeof(int));
  row_of<Entry, room> entries;
  row_of<int, room + 1> first_chunk;
  int count;

  /// Returns the entry that has this chunk.
  __device__ int entry_of(int chunk) const {
    int low = 0, high = count - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (first_chunk[middle] <= chunk) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

/// Calls f(table, chunks) for full tables until all tensors are covered; tensors without elements are skipped.
template <class Entry, class F>
void for_each_table(std::span<const Entry> entries, std::int64_t chunk, F f) {
  tensor_table<Entry> table{};
  int chunks = 0;
  const auto flush = [&] {
    if (table.count > 0) f(table, chunks);
    table.count = 0;
    chunks = 0;
  };
  for (const Entry& entry : entries) {
    if (entry.size <= 0) continue;
    if (table.count == tensor_table<Entry>::room) flush();
    table.entries[table.count] = entry;
    table.first_chunk[table.count] = chunks;
    chunks += static_cast<int>((entry.size + chunk - 1) / chunk);
    table.first_chunk[++table.count] = chunks;
  }
  flush();
}

}  // namespace plait::kernels::detail
