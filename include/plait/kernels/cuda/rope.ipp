// The kernels and launches of kernels/cuda/rope.hpp, which includes this where CUDA is compiled.
#pragma once

#include <cstddef>
#include <vector>

#include "plait/kernels/cuda/chunk.hpp"
#include "plait/kernels/rope_frequencies.hpp"

namespace plait::kernels {

template <class S>
void rope_table(cuda& device, const std::int64_t* positions, std::int64_t count, std::span<const double> frequencies,
                S* cosine, S* sine) {
  const std::size_t n = static_cast<std::size_t>(count) * frequencies.size();
  if (n == 0) return;
  std::vector<S> table(2 * n);
  rope_rotations(positions, count, frequencies, table.data(), table.data() + n);
  device.upload(cosine, table.data(), n * sizeof(S), device.main_stream());
  device.upload(sine, table.data() + n, n * sizeof(S), device.main_stream());
}

namespace detail {

/// direction is 1 to rotate and -1 to rotate back; `from` may be x. The threads of a block's first dimension share a
/// row.
template <int Width, class T, class S>
static __global__ void rope_kernel(const T* from, std::int64_t from_stride, T* x, const S* cosine, const S* sine,
                                   std::int64_t rows, int heads, int half, std::int64_t row_stride,
                                   std::int64_t table_rows, S direction) {
  const int per_head = half / Width;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; r < rows;
       r += static_cast<std::int64_t>(gridDim.x) * blockDim.y) {
    // A division of 32 bits is a fraction of one of 64.
    const std::int64_t table_row = rows <= 0x7fffffff && table_rows <= 0x7fffffff
                                       ? static_cast<unsigned>(r) % static_cast<unsigned>(table_rows)
                                       : r % table_rows;
    const std::int64_t table = table_row * half;
    for (int i = static_cast<int>(threadIdx.x); i < heads * per_head; i += static_cast<int>(blockDim.x)) {
      const int head = i / per_head, c = (i - head * per_head) * Width;
      const std::int64_t at = static_cast<std::int64_t>(head) * 2 * half + c;
      const T* const source = from + r * from_stride + at;
      T* const first = x + r * row_stride + at;
      auto a = load_chunk<Width>(source), b = load_chunk<Width>(source + half);
      const auto cosines = load_chunk<Width>(cosine + table + c), sines = load_chunk<Width>(sine + table + c);
      PLAIT_UNROLL
      for (int j = 0; j < Width; ++j) {
        const S u = number<S>(a.at[j]), v = number<S>(b.at[j]), turn = direction * sines.at[j];
        a.at[j] = number<T>(u * cosines.at[j] - v * turn);
        b.at[j] = number<T>(v * cosines.at[j] + u * turn);
      }
      store_chunk(first, a);
      store_chunk(first + half, b);
    }
  }
}

template <class T, class S>
void rope(cuda& device, const T* from, std::int64_t from_stride, T* x, const S* cosine, const S* sine,
          std::int64_t rows, std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride,
          std::int64_t table_rows, S direction) {
  const std::int64_t half = head_dim / 2;
  if (rows <= 0 || heads <= 0 || half <= 0) return;
  constexpr int width = chunk_width<T, S>();
  const bool vectors = aligned16(from, x, cosine, sine) && half % width == 0 && (row_stride | from_stride) % width == 0;
  with_chunk<width>(vectors, [&](auto chosen) {
    constexpr int n = decltype(chosen)::value;
    constexpr std::int64_t threads = 256;
    const std::int64_t chunks = heads * half / n;
    const std::int64_t warps = chunks < threads ? (chunks + 31) / 32 : threads / 32;
    const dim3 block(static_cast<unsigned>(32 * warps), static_cast<unsigned>(threads / (32 * warps)));
    plait::detail::launch(device, {plait::detail::blocks_for(rows, block.y), block}, rope_kernel<n, T, S>, from,
                          from_stride, x, cosine, sine, rows, static_cast<int>(heads), static_cast<int>(half),
                          row_stride, table_rows, direction);
  });
}

}  // namespace detail

template <class T>
void rope_forward(cuda& device, T* x, const statistic_of<T>* cosine, const statistic_of<T>* sine, std::int64_t rows,
                  std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride, std::int64_t table_rows) {
  detail::rope<T>(device, x, row_stride, x, cosine, sine, rows, heads, head_dim, row_stride, table_rows,
                  statistic_of<T>(1));
}

template <class T>
void rope_forward(cuda& device, const T* from, std::int64_t from_stride, T* x, const statistic_of<T>* cosine,
                  const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                  std::int64_t row_stride, std::int64_t table_rows) {
  detail::rope<T>(device, from, from_stride, x, cosine, sine, rows, heads, head_dim, row_stride, table_rows,
                  statistic_of<T>(1));
}

template <class T>
void rope_backward(cuda& device, T* dx, const statistic_of<T>* cosine, const statistic_of<T>* sine, std::int64_t rows,
                   std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride, std::int64_t table_rows) {
  detail::rope<T>(device, dx, row_stride, dx, cosine, sine, rows, heads, head_dim, row_stride, table_rows,
                  statistic_of<T>(-1));
}

template <class T>
void rope_backward(cuda& device, const T* from, std::int64_t from_stride, T* dx, const statistic_of<T>* cosine,
                   const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                   std::int64_t row_stride, std::int64_t table_rows) {
  detail::rope<T>(device, from, from_stride, dx, cosine, sine, rows, heads, head_dim, row_stride, table_rows,
                  statistic_of<T>(-1));
}

}  // namespace plait::kernels
