// CUDA kernels of the cross entropy of softmax. Test: tests/cuda/kernels/kernel_losses.cpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda_launch.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/cuda/math.hpp"

namespace plait::kernels::detail {

// A block's loop over one row with any alignment, in 16-byte vectors where possible. kernels/cuda/arrays.hpp has rows
// that all begin on 16-byte boundaries.

/// A block loops over `size` elements of a row with any alignment. Calls vectors(i, j) for the indices of two whole
/// 16-byte vectors, which can be loaded at once; j is -1 if only one is left. Calls single(i) for the elements before
/// and after them. `row` is any array that the functions access as vectors. `whole` is false if they cannot, because
/// two arrays differ in alignment.
template <class T, class Vectors, class Single>
__device__ inline void walk_row(const T* row, std::int64_t size, bool whole, Vectors vectors, Single single) {
  constexpr int n = vector16<T>::size;
  std::int64_t head = size;
  if (whole) {
    const auto over = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(row) / sizeof(T) % n);
    head = over == 0 ? 0 : n - over;
    if (head > size) head = size;
  }
  const std::int64_t tail = head + (size - head) / n * n;
  for (std::int64_t k = threadIdx.x; k < head; k += blockDim.x) single(k);
  const std::int64_t step = blockDim.x * n;
  std::int64_t i = head + threadIdx.x * n;
  for (; i + step < tail; i += 2 * step) vectors(i, i + step);
  if (i < tail) vectors(i, -1);
  for (std::int64_t k = tail + threadIdx.x; k < size; k += blockDim.x) single(k);
}

/// Whether two rows have their 16-byte vectors at equal indices.
template <class T>
__device__ inline bool lie_alike(const T* a, const T* b) {
  return reinterpret_cast<std::uintptr_t>(a) % 16 == reinterpret_cast<std::uintptr_t>(b) % 16;
}

}  // namespace plait::kernels::detail

namespace plait::kernels {

namespace detail {

/// e^x. A float's error is below 2 units in the last place plus |x| / 2^24. For large |x| the term is small (below
/// 2^-126 it is 0).
__device__ inline float exp_of(float x) { return fast_exp2(x * 1.4426950408889634f); }
__device__ inline double exp_of(double x) { return exp(x); }

template <class S>
__device__ inline S nothing() {
  return -infinite<S>;
}

/// Whether the row has a loss. Reports an invalid target if `faults` is not null.
template <class Id>
__device__ inline bool row_counts(const Id* targets, std::int64_t row, const vocabulary_range& range,
                                  std::int64_t ignore_index, device_fault* faults) {
  const auto target = static_cast<std::int64_t>(targets[row]);
  if (target == ignore_index) return false;
  if (target >= 0 && target < range.vocab) return true;
  if (faults != nullptr) report_fault(faults, device_fault::cross_entropy_target, row, target, range.vocab);
  return false;
}

/// A running maximum, the sum of exponentials relative to it, and the sum (Milakov and Gimelshein 2018).
template <class S>
struct online_statistics {
  S maximum, sum_exp, sum;

  __device__ void raise(S to) {
    if (!(to > maximum)) return;
    sum_exp *= exp_of(maximum - to);
    maximum = to;
  }
  /// Returns the maximum, or 0 if it is -infinity: exp(-infinity - 0) is 0, but -infinity - -infinity would be NaN.
  __device__ S base() const { return maximum > nothing<S>() ? maximum : S(0); }
};

/// Returns the larger number; ignores NaN.
__device__ inline float larger(float a, float b) { return fmaxf(a, b); }
__device__ inline double larger(double a, double b) { return fmax(a, b); }

/// Each row has a block. With `Online` it computes row_max too; else row_max is an input.
template <bool Online, class T, class Id>
__global__ static void statistics_of_rows(const T* logits, const Id* targets, statistic_of<T>* row_max,
                                          statistic_of<T>* sum_exp, statistic_of<T>* target_logit,
                                          statistic_of<T>* sum_logits, std::int64_t rows, const vocabulary_range range,
                                          std::int64_t valid, std::int64_t ignore_index, device_fault* faults) {
  using S = statistic_of<T>;
  constexpr int n = vector16<T>::size;
  __shared__ S scratch[warp_lanes];
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const x = logits + row * range.columns;
    online_statistics<S> mine{Online ? nothing<S>() : row_max[row], S(0), S(0)};
    walk_row(
        x, valid, true,
        [&](std::int64_t i, std::int64_t j) {
          const vector16<T> v = load_vector(x + i), w = j < 0 ? v : load_vector(x + j);
          if constexpr (Online) {
            S largest = number<S>(v.at[0]);
            PLAIT_UNROLL
            for (int k = 0; k < n; ++k) largest = larger(largest, larger(number<S>(v.at[k]), number<S>(w.at[k])));
            mine.raise(largest);
          }
          const S base = mine.base();
          const auto add = [&](const vector16<T>& some) {
            PLAIT_UNROLL
            for (int k = 0; k < n; ++k) mine.sum_exp += exp_of(number<S>(some.at[k]) - base);
            if (sum_logits == nullptr) return;
            PLAIT_UNROLL
            for (int k = 0; k < n; ++k) mine.sum += number<S>(some.at[k]);
          };
          add(v);
          if (j >= 0) add(w);
        },
        [&](std::int64_t i) {
          const S value = number<S>(x[i]);
          if constexpr (Online) mine.raise(value);
          mine.sum_exp += exp_of(value - mine.base());
          mine.sum += value;
        });
    S share = mine.sum_exp;
    if constexpr (Online) {
      const S maximum = block_max(mine.maximum, scratch, nothing<S>());
      if (mine.maximum > nothing<S>()) share *= exp_of(mine.maximum - maximum);
      mine.maximum = maximum;
    }
    const S total = block_sum(share, scratch);
    const S sum = sum_logits == nullptr ? S(0) : block_sum(mine.sum, scratch);
    if (threadIdx.x == 0) {
      row_counts(targets, row, range, ignore_index, faults);
      const std::int64_t at = static_cast<std::int64_t>(targets[row]) - range.first_column;
      if (Online) row_max[row] = mine.maximum;
      sum_exp[row] = total;
      target_logit[row] = at >= 0 && at < valid ? number<S>(x[at]) : S(0);
      if (sum_logits != nullptr) sum_logits[row] = sum;
    }
  }
}

template <class T>
__global__ static void max_of_rows(const T* logits, statistic_of<T>* row_max, std::int64_t rows, std::int64_t columns,
                                   std::int64_t valid) {
  using S = statistic_of<T>;
  __shared__ S scratch[warp_lanes];
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const x = logits + row * columns;
    S largest = nothing<S>();
    const auto raise = [&](T element) {
      const S value = number<S>(element);
      largest = value > largest ? value : largest;
    };
    walk_row(
        x, valid, true,
        [&](std::int64_t i, std::int64_t j) {
          const vector16<T> v = load_vector(x + i), w = j < 0 ? v : load_vector(x + j);
          PLAIT_UNROLL
          for (int k = 0; k < vector16<T>::size; ++k) {
            raise(v.at[k]);
            raise(w.at[k]);
          }
        },
        [&](std::int64_t i) { raise(x[i]); });
    largest = block_max(largest, scratch, nothing<S>());
    if (threadIdx.x == 0) row_max[row] = largest;
  }
}

template <class S>
__global__ static void rescale_sums(const S* local_max, const S* global_max, S* sum_exp, std::int64_t rows) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  sum_exp[row] = local_max[row] == nothing<S>() ? S(0) : sum_exp[row] * exp(local_max[row] - global_max[row]);
}

template <class S, class Id>
__global__ static void losses_of_rows(const Id* targets, const S* row_max, const S* sum_exp, const S* target_logit,
                                      const S* sum_logits, S* loss, std::int64_t rows, const vocabulary_range range,
                                      const cross_entropy_settings s, device_fault* faults) {
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  double value = 0;
  if (row_counts(targets, row, range, s.ignore_index, faults)) {
    const double lse = static_cast<double>(row_max[row]) + log(static_cast<double>(sum_exp[row]));
    value = (1.0 - s.label_smoothing) * (lse - static_cast<double>(target_logit[row])) + s.z_loss * lse * lse;
    if (s.label_smoothing != 0.0) {
      value += s.label_smoothing * (lse - static_cast<double>(sum_logits[row]) / static_cast<double>(range.vocab));
    }
  }
  loss[row] = static_cast<S>(value);
}

/// Each row has a block, which reads every logit before it overwrites it.
template <class T, class Id>
__global__ static void gradients_of_rows(const T* logits, const Id* targets, const statistic_of<T>* row_max,
                                         const statistic_of<T>* sum_exp, const statistic_of<T>* scale, T* dlogits,
                                         std::int64_t rows, const vocabulary_range range, std::int64_t valid,
                                         const cross_entropy_settings s, device_fault* faults) {
  using S = statistic_of<T>;
  constexpr int n = vector16<T>::size;
  __shared__ S numbers[2];
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const x = logits + row * range.columns;
    T* const d = dlogits + row * range.columns;
    if (!row_counts(targets, row, range, s.ignore_index, threadIdx.x == 0 ? faults : nullptr)) {
      walk_row(
          d, range.columns, true,
          [&](std::int64_t i, std::int64_t j) {
            store_vector(d + i, vector16<T>{});
            if (j >= 0) store_vector(d + j, vector16<T>{});
          },
          [&](std::int64_t i) { d[i] = T{}; });
      continue;
    }
    const S maximum = row_max[row];
    const std::int64_t at = static_cast<std::int64_t>(targets[row]) - range.first_column;
    const bool mine = threadIdx.x == 0 && at >= 0 && at < valid;
    S at_target = S(0);
    if (threadIdx.x == 0) {  // divisions and logarithms in double, once per row
      const auto total = static_cast<double>(sum_exp[row]), g = static_cast<double>(scale[row]);
      const double lse = static_cast<double>(maximum) + log(total);
      const S factor = static_cast<S>(g * (1.0 + 2.0 * s.z_loss * lse) / total);
      const S uniform = static_cast<S>(g * s.label_smoothing / static_cast<double>(range.vocab));
      if (mine) {
        at_target = exp_of(number<S>(x[at]) - maximum) * factor - uniform;
        at_target -= static_cast<S>(g * (1.0 - s.label_smoothing));
      }
      numbers[0] = factor;
      numbers[1] = uniform;
    }
    __syncthreads();  // all threads have read the target's logit
    const S factor = numbers[0], uniform = numbers[1];
    const auto gradient = [&](T element) { return exp_of(number<S>(element) - maximum) * factor - uniform; };
    walk_row(
        x, valid, lie_alike(x, d),
        [&](std::int64_t i, std::int64_t j) {
          vector16<T> v = load_vector(x + i), w = j < 0 ? v : load_vector(x + j);
          PLAIT_UNROLL
          for (int k = 0; k < n; ++k) v.at[k] = number<T>(gradient(v.at[k]));
          store_vector(d + i, v);
          if (j < 0) return;
          PLAIT_UNROLL
          for (int k = 0; k < n; ++k) w.at[k] = number<T>(gradient(w.at[k]));
          store_vector(d + j, w);
        },
        [&](std::int64_t i) { d[i] = number<T>(gradient(x[i])); });
    for (std::int64_t i = valid + threadIdx.x; i < range.columns; i += blockDim.x) d[i] = T{};
    __syncthreads();  // the gradients are written; the target's is corrected next
    if (mine) d[at] = number<T>(at_target);
  }
}

/// Returns the threads for a row of `columns` elements; each thread takes one vector at a time.
template <class T>
plait::detail::launch_shape block_per_row(std::int64_t rows, std::int64_t columns) {
  const std::int64_t vectors = (columns + vector16<T>::size - 1) / vector16<T>::size;
  const auto threads = static_cast<unsigned>(std::clamp<std::int64_t>((vectors + 31) / 32 * 32, 32, 512));
  return {plait::detail::blocks_for(rows, 1), threads};
}

}  // namespace detail

template <class T>
void cross_entropy_max(cuda& device, const T* logits, statistic_of<T>* row_max, std::int64_t rows,
                       const vocabulary_range& range) {
  if (rows <= 0) return;
  plait::detail::launch(device, detail::block_per_row<T>(rows, range.columns), detail::max_of_rows<T>, logits, row_max,
                        rows, range.columns, range.valid());
}

template <class T, class Id>
void cross_entropy_statistics(cuda& device, const T* logits, const Id* targets, const statistic_of<T>* row_max,
                              statistic_of<T>* sum_exp, statistic_of<T>* target_logit, statistic_of<T>* sum_logits,
                              std::int64_t rows, const vocabulary_range& range,
                              const cross_entropy_settings& settings) {
  if (rows <= 0) return;
  plait::detail::launch(device, detail::block_per_row<T>(rows, range.columns), detail::statistics_of_rows<false, T, Id>,
                        logits, targets, const_cast<statistic_of<T>*>(row_max), sum_exp, target_logit, sum_logits, rows,
                        range, range.valid(), settings.ignore_index, device.faults());
}

template <class T, class Id>
void cross_entropy_local_statistics(cuda& device, const T* logits, const Id* targets, statistic_of<T>* row_max,
                                    statistic_of<T>* sum_exp, statistic_of<T>* target_logit,
                                    statistic_of<T>* sum_logits, std::int64_t rows, const vocabulary_range& range,
                                    const cross_entropy_settings& settings) {
  if (rows <= 0) return;
  plait::detail::launch(device, detail::block_per_row<T>(rows, range.columns), detail::statistics_of_rows<true, T, Id>,
                        logits, targets, row_max, sum_exp, target_logit, sum_logits, rows, range, range.valid(),
                        settings.ignore_index, device.faults());
}

template <class S>
void cross_entropy_rescale(cuda& device, const S* local_max, const S* global_max, S* sum_exp, std::int64_t rows) {
  if (rows <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(rows, 128), 128}, detail::rescale_sums<S>, local_max,
                        global_max, sum_exp, rows);
}

template <class S, class Id>
void cross_entropy_loss(cuda& device, const Id* targets, const S* row_max, const S* sum_exp, const S* target_logit,
                        const S* sum_logits, S* loss, std::int64_t rows, const vocabulary_range& range,
                        const cross_entropy_settings& s) {
  require(s.label_smoothing == 0.0 || sum_logits != nullptr, "cross_entropy_loss: label_smoothing needs sum_logits");
  if (rows <= 0) return;
  plait::detail::launch(device, {plait::detail::blocks_for(rows, 128), 128}, detail::losses_of_rows<S, Id>, targets,
                        row_max, sum_exp, target_logit, sum_logits, loss, rows, range, s, device.faults());
}

template <class T, class Id>
void cross_entropy_backward(cuda& device, const T* logits, const Id* targets, const statistic_of<T>* row_max,
                            const statistic_of<T>* sum_exp, const statistic_of<T>* scale, T* dlogits, std::int64_t rows,
                            const vocabulary_range& range, const cross_entropy_settings& s) {
  if (rows <= 0 || range.columns <= 0) return;
  plait::detail::launch(device, detail::block_per_row<T>(rows, range.columns), detail::gradients_of_rows<T, Id>, logits,
                        targets, row_max, sum_exp, scale, dlogits, rows, range, range.valid(), s, device.faults());
}

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
