// Rotary position embeddings on the CPU, in the rotate_half convention of Hugging Face: element i of a head is rotated
// with element i + head_dim / 2, not with its neighbour, by the angle position * frequency[i]. Frequencies are in
// kernels/rope_frequencies.hpp. Test: tests/unit/kernels/rope_embedding.cpp.
#pragma once

#include <cstdint>
#include <span>

#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/rope_frequencies.hpp"

namespace plait::kernels {

/// cosine, sine [count, frequencies]: the rotations of the given positions (see `rope_rotations`).
template <class T>
void rope_table(cpu&, const std::int64_t* positions, std::int64_t count, std::span<const double> frequencies, T* cosine,
                T* sine) {
  rope_rotations(positions, count, frequencies, cosine, sine);
}

namespace detail {
/// direction is 1 to rotate and -1 to rotate back; `from` may be x.
template <class T>
void rotate(const T* from, std::int64_t from_stride, T* x, const statistic_of<T>* cosine, const statistic_of<T>* sine,
            std::int64_t rows, std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride,
            std::int64_t table_rows, arithmetic<T> direction) {
  using A = arithmetic<T>;
  const std::int64_t half = head_dim / 2;
  for (std::int64_t r = 0; r < rows; ++r) {
    const A* const c = cosine + r % table_rows * half;
    const A* const s = sine + r % table_rows * half;
    for (std::int64_t h = 0; h < heads; ++h) {
      T* const first = x + r * row_stride + h * head_dim;
      T* const second = first + half;
      const T* const source = from + r * from_stride + h * head_dim;
      PLAIT_IVDEP
      for (std::int64_t i = 0; i < half; ++i) {
        const A a = widened(source[i]), b = widened(source[half + i]), turn = direction * s[i];
        first[i] = converted<T>(a * c[i] - b * turn);
        second[i] = converted<T>(b * c[i] + a * turn);
      }
    }
  }
}
}  // namespace detail

/// Rotates x [rows, heads, head_dim] in place; row_stride is the elements between rows, so queries or keys inside a
/// fused projection can be rotated where they are. Row r uses row r % table_rows of cosine and sine [table_rows,
/// head_dim / 2]: pass the local sequence length where rows are batch times sequence.
template <class T>
void rope_forward(cpu&, T* x, const statistic_of<T>* cosine, const statistic_of<T>* sine, std::int64_t rows,
                  std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride, std::int64_t table_rows) {
  detail::rotate<T>(x, row_stride, x, cosine, sine, rows, heads, head_dim, row_stride, table_rows, 1);
}

/// Writes to x the rotation of another array in one pass: `from` [rows, heads, head_dim] has rows that are from_stride
/// elements apart, and must not overlap x.
template <class T>
void rope_forward(cpu&, const T* from, std::int64_t from_stride, T* x, const statistic_of<T>* cosine,
                  const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                  std::int64_t row_stride, std::int64_t table_rows) {
  detail::rotate<T>(from, from_stride, x, cosine, sine, rows, heads, head_dim, row_stride, table_rows, 1);
}

/// Turns the gradient of the rotated values into the gradient of the original ones, in place: the inverse rotation.
template <class T>
void rope_backward(cpu&, T* dx, const statistic_of<T>* cosine, const statistic_of<T>* sine, std::int64_t rows,
                   std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride, std::int64_t table_rows) {
  detail::rotate<T>(dx, row_stride, dx, cosine, sine, rows, heads, head_dim, row_stride, table_rows, -1);
}

/// Writes to dx the inverse rotation of another array, whose rows lie as those of `rope_forward`.
template <class T>
void rope_backward(cpu&, const T* from, std::int64_t from_stride, T* dx, const statistic_of<T>* cosine,
                   const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                   std::int64_t row_stride, std::int64_t table_rows) {
  detail::rotate<T>(from, from_stride, dx, cosine, sine, rows, heads, head_dim, row_stride, table_rows, -1);
}

}  // namespace plait::kernels
