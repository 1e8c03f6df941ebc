// CUDA kernels of sums into numbers in a GPU's memory. Test: tests/cuda/kernels/kernel_optimizer.cpp.
#pragma once

#include <cmath>
#include <cstddef>

#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/arrays.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels {

namespace detail {

inline constexpr std::int64_t sum_chunk = 16384;  ///< elements of a partial sum
inline constexpr int sum_threads = 256;
inline constexpr int sum_of_sums_threads = 1024;

/// Returns the sum over `size` elements by the whole block, to every thread.
template <bool Squares, class S>
__device__ inline double block_sum_of(const S* x, std::int64_t size, double* scratch) {
  constexpr int width = vector16<S>::size;
  const auto term = [](S element) {
    const double value = number<double>(element);
    return Squares ? value * value : value;
  };
  double total = 0;
  std::int64_t done = 0;
  if (holds_packs<width>(x)) {
    const std::int64_t vectors = size / width;
    for (std::int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
      const vector16<S> v = load_vector(x + i * width);
      for (int j = 0; j < width; ++j) total += term(v.at[j]);
    }
    done = vectors * width;
  }
  for (std::int64_t i = done + threadIdx.x; i < size; i += blockDim.x) total += term(x[i]);
  return block_sum(total, scratch);
}

template <class S>
__global__ static void sum_chunks(const S* x, std::int64_t n, double* sums) {
  __shared__ double scratch[warp_lanes];
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * sum_chunk;
  const std::int64_t size = n - begin < sum_chunk ? n - begin : sum_chunk;
  const double total = block_sum_of<false>(x + begin, size, scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

template <class G>
__global__ static void sum_squares_of_chunks(const tensor_table<const_elements<G>> table, double* sums) {
  __shared__ double scratch[warp_lanes];
  const int chunk = static_cast<int>(blockIdx.x), entry = table.entry_of(chunk);
  const std::int64_t begin = (chunk - table.first_chunk[entry]) * sum_chunk;
  const std::int64_t left = table.entries[entry].size - begin;
  const double total =
      block_sum_of<true>(table.entries[entry].data + begin, left < sum_chunk ? left : sum_chunk, scratch);
  if (threadIdx.x == 0) sums[chunk] = total;
}

/// *out = the partial sums, or *out plus these with `add`; one block.
static __global__ void sum_of_sums(const double* sums, std::int64_t count, bool add, double* out) {
  __shared__ double scratch[warp_lanes];
  double total = 0;
  PLAIT_UNROLL_BY(8)  // loads in flight, because there is only one block
  for (std::int64_t i = threadIdx.x; i < count; i += sum_of_sums_threads) total += sums[i];
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) *out = add ? *out + total : total;
}

/// Adds the digest of each block's elements to *out.
template <class T>
__global__ static void digest_of_elements(const T* x, std::int64_t n, value_digest* out) {
  using word = unsigned long long;
  __shared__ double scratch[warp_lanes];
  __shared__ word hash;
  if (threadIdx.x == 0) hash = 0;
  __syncthreads();
  value_digest own;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  constexpr int elements = elements_of_word<T>;
  for (std::int64_t w = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; w * elements < n; w += step) {
    const T* const from = x + w * elements;
    const std::int64_t left = n - w * elements, count = left < elements ? left : elements;
    const std::uint64_t index = mixed_index(w);
    own.hash += hash_of_word(word_of(from, count), index);
    for (int j = 0; j < count; ++j) {
      const double value = number<double>(from[j]);
      own.squares += value * value;
      for (int k = 0; k < digest_sketches; ++k)
        own.sketch[k] += index >> (digest_sketches * j + k) & 1 ? -value : value;
    }
  }
  atomicAdd(&hash, static_cast<word>(own.hash));
  const double squares = block_sum(own.squares, scratch);
  if (threadIdx.x == 0) atomicAdd(&out->squares, squares);
  for (int k = 0; k < digest_sketches; ++k) {
    const double sketch = block_sum(own.sketch[k], scratch);
    if (threadIdx.x == 0) atomicAdd(&out->sketch[k], sketch);
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<word*>(&out->hash), hash);
}

/// One block. Its threads' sums are exact, and so is the sum of these.
template <class S>
__global__ static void sum_multiples(const S* x, std::int64_t n, double quantum, double* out) {
  __shared__ double scratch[warp_lanes];
  double total = 0;
  for (std::int64_t i = threadIdx.x; i < n; i += blockDim.x)
    total += nearbyint(number<double>(x[i]) / quantum) * quantum;
  total = block_sum(total, scratch);
  if (threadIdx.x == 0) *out = total;
}

/// Threads may add integers in any order.
template <class G>
__global__ static void exact_squares_of_chunks(const tensor_table<const_elements<G>> table, std::int64_t* bins) {
  using word = unsigned long long;
  __shared__ word own[exact_squares::words];
  for (int i = static_cast<int>(threadIdx.x); i < exact_squares::words; i += static_cast<int>(blockDim.x)) own[i] = 0;
  __syncthreads();
  const int chunk = static_cast<int>(blockIdx.x), entry = table.entry_of(chunk);
  const std::int64_t begin = (chunk - table.first_chunk[entry]) * sum_chunk;
  const std::int64_t left = table.entries[entry].size - begin, size = left < sum_chunk ? left : sum_chunk;
  const G* const x = table.entries[entry].data + begin;
  for (std::int64_t i = threadIdx.x; i < size; i += blockDim.x) {
    const double value = number<double>(x[i]);
    const exact_squares::parts_of_number parts = exact_squares::split(value * value);
    if (!parts.finite) atomicAdd(&own[exact_squares::bins * exact_squares::digits], word{1});
    for (int d = 0; d < exact_squares::digits; ++d)
      if (parts.digit[d] != 0) atomicAdd(&own[parts.first + d], static_cast<word>(parts.digit[d]));
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < exact_squares::words; i += static_cast<int>(blockDim.x))
    if (own[i] != 0) atomicAdd(reinterpret_cast<word*>(bins) + i, own[i]);
}
static __global__ void sum_of_bins_of(const std::int64_t* bins, double* out) { *out = exact_squares::total(bins); }

static __global__ void reciprocal_of(const double* x, double* y) { *y = *x > 0 ? 1 / *x : 0.0; }

template <class T>
__global__ static void fill_with(T* y, std::int64_t n, const double* value) {
  const T element = number<T>(*value);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    y[i] = element;
  }
}

static __global__ void clip_numbers_of(const double* squares, double limit, clip_numbers* out) {
  const double norm = sqrt(*squares);
  const bool finite = norm - norm == 0;
  out->norm = norm;
  out->factor = finite ? clip_factor(norm, limit) : 0.0;
  out->update = finite ? 1.0 : 0.0;
  if (!finite) out->skips += 1;
}

}  // namespace detail

template <class S>
void sum(cuda& device, const S* x, std::int64_t n, double* out) {
  if (n <= 0) return device.zero(out, sizeof(double), device.main_stream());
  const unsigned chunks = plait::detail::blocks_for(n, detail::sum_chunk);
  if (chunks == 1) return plait::detail::launch(device, {1, detail::sum_threads}, detail::sum_chunks<S>, x, n, out);
  auto sums = make_buffer<double>(device, chunks);
  double* const partial = sums.template data<double>();
  plait::detail::launch(device, {chunks, detail::sum_threads}, detail::sum_chunks<S>, x, n, partial);
  plait::detail::launch(device, {1, detail::sum_of_sums_threads}, detail::sum_of_sums, partial, chunks, false, out);
}

template <class T>
void digest(cuda& device, const T* x, std::int64_t n, value_digest* out) {
  device.zero(out, sizeof(value_digest), device.main_stream());
  if (n <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(n, 4 * detail::sum_threads, 1024), detail::sum_threads},
                        detail::digest_of_elements<T>, x, n, out);
}

template <class G>
void add_sum_squares(cuda& device, std::span<const const_elements<G>> parts, double* out) {
  std::int64_t chunks = 0;
  for (const const_elements<G>& part : parts) chunks += (part.size + detail::sum_chunk - 1) / detail::sum_chunk;
  if (chunks == 0) return;
  auto sums = make_buffer<double>(device, static_cast<std::size_t>(chunks));
  double* const partial = sums.template data<double>();
  double* next = partial;
  detail::for_each_table(parts, detail::sum_chunk, [&](const auto& table, int count) {
    plait::detail::launch(device, {static_cast<unsigned>(count), detail::sum_threads}, detail::sum_squares_of_chunks<G>,
                          table, next);
    next += count;
  });
  plait::detail::launch(device, {1, detail::sum_of_sums_threads}, detail::sum_of_sums, partial, chunks, true, out);
}

#ifndef PLAIT_COMPILING_CUDA_DOUBLE
PLAIT_CUDA_INLINE void reciprocal(cuda& device, const double* x, double* y) {
  plait::detail::launch(device, {1, 1}, detail::reciprocal_of, x, y);
}
#endif

template <class T>
void fill_from(cuda& device, T* y, std::int64_t n, const double* value) {
  if (n <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(n, 256, 4096), 256}, detail::fill_with<T>, y, n, value);
}

template <class S>
void sum_of_multiples(cuda& device, const S* x, std::int64_t n, double quantum, double* out) {
  plait::detail::launch(device, {1, detail::sum_of_sums_threads}, detail::sum_multiples<S>, x, n, quantum, out);
}

template <class G>
void add_exact_squares(cuda& device, std::span<const const_elements<G>> parts, std::int64_t* bins) {
  detail::for_each_table<const_elements<G>>(
      parts, detail::sum_chunk, [&](const detail::tensor_table<const_elements<G>>& table, int chunks) {
        plait::detail::launch(device, {static_cast<unsigned>(chunks), detail::sum_threads},
                              detail::exact_squares_of_chunks<G>, table, bins);
      });
}

#ifndef PLAIT_COMPILING_CUDA_DOUBLE
PLAIT_CUDA_INLINE void sum_of_bins(cuda& device, const std::int64_t* bins, double* out) {
  plait::detail::launch(device, {1, 1}, detail::sum_of_bins_of, bins, out);
}
PLAIT_CUDA_INLINE void clip(cuda& device, const double* squares, double limit, clip_numbers* out) {
  plait::detail::launch(device, {1, 1}, detail::clip_numbers_of, squares, limit, out);
}
#endif

}  // namespace plait::kernels
