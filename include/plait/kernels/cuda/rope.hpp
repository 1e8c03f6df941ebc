// Rotary position embeddings on a GPU; the convention is in kernels/cpu/rope.hpp. For bf16 the tables are float. They
// are made on the host and uploaded (kernels/rope_frequencies.hpp). Test: tests/cuda/kernel_elementwise.cpp.
#pragma once

#include <cstdint>
#include <span>

#include "plait/core/compiled.hpp"
#include "plait/core/precision.hpp"
#include "plait/device/cuda.hpp"

namespace plait::kernels {

/// cosine, sine [count, frequencies] in device memory: the rotations of the given positions, which like the frequencies
/// are in host memory (see `rope_rotations`).
template <class S>
void rope_table(cuda& device, const std::int64_t* positions, std::int64_t count, std::span<const double> frequencies,
                S* cosine, S* sine);

/// Rotates x [rows, heads, head_dim] in place; row_stride is the elements between rows, so queries or keys inside a
/// fused projection can be rotated where they are. Row r uses row r % table_rows of cosine and sine [table_rows,
/// head_dim / 2]: pass the local sequence length where rows are batch times sequence.
template <class T>
void rope_forward(cuda& device, T* x, const statistic_of<T>* cosine, const statistic_of<T>* sine, std::int64_t rows,
                  std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride, std::int64_t table_rows);

/// Writes to x the rotation of another array in one pass: `from` [rows, heads, head_dim] has rows that are from_stride
/// elements apart, and must not overlap x.
template <class T>
void rope_forward(cuda& device, const T* from, std::int64_t from_stride, T* x, const statistic_of<T>* cosine,
                  const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                  std::int64_t row_stride, std::int64_t table_rows);

/// Turns the gradient of the rotated values into the gradient of the original ones, in place: the inverse rotation.
template <class T>
void rope_backward(cuda& device, T* dx, const statistic_of<T>* cosine, const statistic_of<T>* sine, std::int64_t rows,
                   std::int64_t heads, std::int64_t head_dim, std::int64_t row_stride, std::int64_t table_rows);

/// Writes to dx the inverse rotation of another array, whose rows lie as those of `rope_forward`.
template <class T>
void rope_backward(cuda& device, const T* from, std::int64_t from_stride, T* dx, const statistic_of<T>* cosine,
                   const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                   std::int64_t row_stride, std::int64_t table_rows);

}  // namespace plait::kernels

#ifdef PLAIT_CUDA_KERNELS
#include "plait/kernels/cuda/rope.ipp"
#endif
