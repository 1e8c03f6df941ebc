// CUDA kernels of the rows of experts: counts, limits, routes and the moves of rows. Test:
// tests/cuda/kernels/kernel_experts.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

// ---- counts, limits and routes: only integers, so results do not depend on an order ------------------------------

static __global__ void count_choices(const std::int32_t* chosen, std::int32_t* counts, std::int64_t all,
                                     std::int64_t size, std::int64_t experts) {
  const std::int64_t j = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j < all && chosen[j] >= 0) atomicAdd(&counts[j / size * experts + chosen[j]], 1);
}

/// A warp for each expert of each sample loops over the choices, in the order of choices and then of the text.
static __global__ void drop_beyond(const std::int32_t* whole, const std::int32_t* in_text, std::int64_t positions,
                                   std::int32_t* choice, std::int64_t first, std::int64_t length, std::int64_t k,
                                   std::int64_t limit) {
  const auto expert = static_cast<std::int32_t>(blockIdx.x);
  const std::int64_t sample = blockIdx.y, lane = threadIdx.x;
  whole += sample * positions * k, choice += sample * length * k;
  std::int64_t taken = 0;
  for (std::int64_t j = 0; j < k; ++j)
    for (std::int64_t begin = 0; begin < positions; begin += warp_lanes) {
      const std::int64_t p = begin + lane, i = p < positions ? in_text[p] : -1;
      const bool has = i >= 0 && whole[i * k + j] == expert;
      const unsigned all = __ballot_sync(whole_warp, has ? 1 : 0);
      const std::int64_t before = taken + __popc(all & ((1u << lane) - 1u));
      if (has && before >= limit && i >= first && i < first + length) choice[(i - first) * k + j] = -1;
      taken += __popc(all);
    }
}

static __global__ void parts_of_choices(const std::int32_t* choice, const std::int32_t* part_of, std::int64_t n,
                                        std::int64_t parts, std::uint32_t* keys, int* values, std::int32_t* counts) {
  const std::int64_t j = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j >= n) return;
  const std::int32_t part = choice[j] < 0 ? -1 : part_of[choice[j]];
  keys[j] = static_cast<std::uint32_t>(part < 0 ? parts : part);
  values[j] = static_cast<int>(j);
  if (part >= 0) atomicAdd(&counts[part], 1);
}
static __global__ void places_of_choices(const std::uint32_t* keys, const int* values, std::int64_t n, std::int64_t k,
                                         std::int64_t parts, std::int32_t* places, std::int32_t* tokens,
                                         const std::int32_t* begins) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const bool leaves = keys[i] < parts;
  std::int64_t row = i;
  if (begins != nullptr && leaves) {
    std::int64_t first = 0;  // the first key of this part, by bisection
    for (std::int64_t beyond = i; first < beyond;) {
      const std::int64_t middle = (first + beyond) / 2;
      if (keys[middle] < keys[i])
        first = middle + 1;
      else
        beyond = middle;
    }
    row = begins[keys[i]] + i - first;
  }
  places[values[i]] = leaves ? static_cast<std::int32_t>(row) : -1;
  if (leaves) tokens[row] = static_cast<std::int32_t>(values[i] / k);
}
static __global__ void clear_tokens(std::int32_t* tokens, std::int64_t rows) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < rows) tokens[row] = -1;
}

/// The change of `update_router_state`, by one block.
template <class M>
__global__ static void change_router_state(M* values, const std::int32_t* counts, std::int64_t experts,
                                           router_state_rule rule, const clip_numbers* clipped) {
  if (clipped != nullptr && clipped->update == 0) return;
  std::int64_t all = 0;
  for (std::int64_t e = 0; e < experts; ++e) all += counts[e];
  for (std::int64_t e = threadIdx.x; e < experts; e += blockDim.x)
    values[e] = number<M>(rule.next(number<double>(values[e]), counts[e] * experts, all));
}

/// Each part, the rows of one peer for one expert, has a block.
static __global__ void sort_parts(const std::int32_t* counts, int peers, int experts, std::int32_t* sorted,
                                  std::int32_t* unsorted) {
  const int peer = static_cast<int>(blockIdx.x) / experts, expert = static_cast<int>(blockIdx.x) % experts;
  std::int32_t came = 0, lies = 0;
  for (int p = 0; p < peers; ++p)
    for (int e = 0; e < experts; ++e) {
      const std::int32_t rows = counts[p * experts + e];
      if (p < peer || (p == peer && e < expert)) came += rows;
      if (e < expert || (e == expert && p < peer)) lies += rows;
    }
  for (int i = static_cast<int>(threadIdx.x); i < counts[blockIdx.x]; i += static_cast<int>(blockDim.x)) {
    sorted[lies + i] = came + i;
    unsorted[came + i] = lies + i;
  }
}

// ---- rows: one block per row -------------------------------------------------------------------------------------

inline unsigned threads_of_row(std::int64_t width) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((width + warp_lanes - 1) / warp_lanes * warp_lanes, 32, 256));
}

template <class T>
__global__ static void copy_rows_from(const T* in, const std::int32_t* from, T* out, std::int64_t rows,
                                      std::int64_t width, bool vectors) {
  constexpr int n = vector16<T>::size;
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    T* const to = out + r * width;
    if (from[r] < 0) {
      for (std::int64_t c = threadIdx.x; c < width; c += blockDim.x) to[c] = number<T>(0.0f);
      continue;
    }
    const T* const source = in + from[r] * width;
    if (vectors) {
      for (std::int64_t c = threadIdx.x * n; c < width; c += blockDim.x * n)
        store_vector(to + c, load_vector(source + c));
    } else {
      for (std::int64_t c = threadIdx.x; c < width; c += blockDim.x) to[c] = source[c];
    }
  }
}

template <class T, class S>
__global__ static void sum_rows_of(const T* rows, const std::int32_t* at, const S* weights, T* y, std::int64_t tokens,
                                   std::int64_t k, std::int64_t width) {
  for (std::int64_t t = blockIdx.x; t < tokens; t += gridDim.x)
    for (std::int64_t c = threadIdx.x; c < width; c += blockDim.x) {
      S sum = 0;
      for (std::int64_t j = t * k; j < (t + 1) * k; ++j)
        if (at[j] >= 0) sum += (weights == nullptr ? S(1) : weights[j]) * number<S>(rows[at[j] * width + c]);
      y[t * width + c] = number<T>(sum);
    }
}

template <class T, class S>
__global__ static void sum_rows_of_backward(const T* rows, const std::int32_t* at, const S* weights, const T* dy,
                                            T* drows, S* dweights, std::int64_t all, std::int64_t k,
                                            std::int64_t width) {
  __shared__ S scratch[warp_lanes];
  for (std::int64_t j = blockIdx.x; j < all; j += gridDim.x) {
    const std::int64_t row = at[j];
    S dot = 0;
    for (std::int64_t c = threadIdx.x; row >= 0 && c < width; c += blockDim.x) {
      const S d = number<S>(dy[j / k * width + c]);
      dot += d * number<S>(rows[row * width + c]);
      drows[row * width + c] = number<T>(weights[j] * d);
    }
    dot = block_sum(dot, scratch);
    if (threadIdx.x == 0) dweights[j] = dot;
  }
}

template <class T, class S>
__global__ static void multiply_rows(const T* x, const T* gates, T* y, std::int64_t rows, std::int64_t width) {
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const S gate = S(1) / (S(1) + exponential(-number<S>(gates[r])));
    for (std::int64_t c = threadIdx.x; c < width; c += blockDim.x)
      y[r * width + c] = number<T>(gate * number<S>(x[r * width + c]));
  }
}

template <class T, class S>
__global__ static void multiply_rows_backward(const T* x, const T* gates, const T* dy, T* dx, T* dgates,
                                              std::int64_t rows, std::int64_t width) {
  __shared__ S scratch[warp_lanes];
  for (std::int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const S gate = S(1) / (S(1) + exponential(-number<S>(gates[r])));
    S dot = 0;
    for (std::int64_t c = r * width + threadIdx.x; c < (r + 1) * width; c += blockDim.x) {
      const S d = number<S>(dy[c]);
      dot += d * number<S>(x[c]);
      dx[c] = number<T>(gate * d);
    }
    dot = block_sum(dot, scratch);
    if (threadIdx.x == 0) dgates[r] = number<T>(dot * gate * (1 - gate));
  }
}

/// Launches a block for each of `rows`.
template <class... Parameters, class... Arguments>
void launch_rows(cuda& device, std::int64_t rows, std::int64_t width, void (*kernel)(Parameters...),
                 Arguments... arguments) {
  if (rows <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(rows, 1), threads_of_row(width)}, kernel, arguments...);
}

}  // namespace plait::kernels::detail

namespace plait::kernels {

template <class T>
void gather_rows(cuda& device, const T* in, const std::int32_t* from, T* out, std::int64_t rows, std::int64_t width) {
  constexpr int n = vector16<T>::size;
  const bool vectors = width % n == 0 && aligned16(in, out);
  detail::launch_rows(device, rows, vectors ? width / n : width, detail::copy_rows_from<T>, in, from, out, rows, width,
                      vectors);
}

template <class T, class S>
void sum_rows(cuda& device, const T* rows, const std::int32_t* at, const S* weights, T* y, std::int64_t tokens,
              std::int64_t k, std::int64_t width) {
  detail::launch_rows(device, tokens, width, detail::sum_rows_of<T, S>, rows, at, weights, y, tokens, k, width);
}

template <class T, class S>
void sum_rows_backward(cuda& device, const T* rows, const std::int32_t* at, const S* weights, const T* dy, T* drows,
                       S* dweights, std::int64_t tokens, std::int64_t k, std::int64_t width) {
  detail::launch_rows(device, tokens * k, width, detail::sum_rows_of_backward<T, S>, rows, at, weights, dy, drows,
                      dweights, tokens * k, k, width);
}

template <class M>
void update_router_state(cuda& device, M* values, const std::int32_t* counts, std::int64_t experts,
                         router_state_rule rule, const clip_numbers* clipped) {
  plait::detail::launch(device, {1, 128}, detail::change_router_state<M>, values, counts, experts, rule, clipped);
}

template <class T>
void multiply_by_gates(cuda& device, const T* x, const T* gates, T* y, std::int64_t rows, std::int64_t width) {
  detail::launch_rows(device, rows, width, detail::multiply_rows<T, arithmetic<T>>, x, gates, y, rows, width);
}

template <class T>
void multiply_by_gates_backward(cuda& device, const T* x, const T* gates, const T* dy, T* dx, T* dgates,
                                std::int64_t rows, std::int64_t width) {
  detail::launch_rows(device, rows, width, detail::multiply_rows_backward<T, arithmetic<T>>, x, gates, dy, dx, dgates,
                      rows, width);
}

#ifndef PLAIT_COMPILING_CUDA_DOUBLE
PLAIT_CUDA_INLINE void count_experts(cuda& device, const std::int32_t* chosen, std::int32_t* counts,
                                     std::int64_t groups, std::int64_t size, std::int64_t experts) {
  const std::int64_t all = groups * size;
  if (all <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(all, 256), 256}, detail::count_choices, chosen, counts, all,
                        size, experts);
}

PLAIT_CUDA_INLINE void drop_choices(cuda& device, const std::int32_t* whole, const std::int32_t* in_text,
                                    std::int64_t positions, std::int32_t* choice, std::int64_t samples,
                                    std::int64_t first, std::int64_t length, std::int64_t k, std::int64_t experts,
                                    std::int64_t limit) {
  if (samples <= 0) return;
  const dim3 grid(static_cast<unsigned>(experts), static_cast<unsigned>(samples));
  plait::detail::launch(device, {grid, warp_lanes}, detail::drop_beyond, whole, in_text, positions, choice, first,
                        length, k, limit);
}

PLAIT_CUDA_INLINE void sort_choices(cuda& device, const std::int32_t* choice, const std::int32_t* part_of,
                                    std::int64_t n, std::int64_t k, std::int64_t parts, std::int32_t* counts,
                                    std::int32_t* places, std::int32_t* tokens, padded_parts padded) {
  device.zero(counts, static_cast<std::size_t>(parts) * sizeof(std::int32_t), device.main_stream());
  if (padded.rows > 0)
    plait::detail::launch(device, {plait::detail::blocks_for(padded.rows, 256), 256}, detail::clear_tokens, tokens,
                          padded.rows);
  if (n <= 0) return;
  auto memory = make_buffer<int>(device, static_cast<std::size_t>(4 * n));
  int* const values = memory.template data<int>();
  auto* const keys = reinterpret_cast<std::uint32_t*>(values + 2 * n);
  detail::key_values pairs{{keys, keys + n}, {values, values + n}};
  const plait::detail::launch_shape shape{plait::detail::blocks_for(n, 256), 256};
  plait::detail::launch(device, shape, detail::parts_of_choices, choice, part_of, n, parts, keys, values, counts);
  detail::sort_pairs(device, pairs, static_cast<int>(n),
                     static_cast<int>(std::bit_width(static_cast<std::uint64_t>(parts))));
  plait::detail::launch(device, shape, detail::places_of_choices, pairs.keys[pairs.now], pairs.values[pairs.now], n, k,
                        parts, places, tokens, padded.begins);
}

PLAIT_CUDA_INLINE void sort_arrivals(cuda& device, const std::int32_t* counts, std::int64_t peers, std::int64_t experts,
                                     std::int32_t* sorted, std::int32_t* unsorted) {
  plait::detail::launch(device, {static_cast<unsigned>(peers * experts), 128}, detail::sort_parts, counts, peers,
                        experts, sorted, unsorted);
}
#endif

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
