// Softmax cross entropy on the CPU, for a rank's columns [rows, columns] of the logits of a split or padded vocabulary
// (layer: nn/loss.hpp). Steps: cross_entropy_max, all-reduce (max), cross_entropy_statistics, all-reduce (sum) of its
// three results, cross_entropy_loss, cross_entropy_backward. cross_entropy_local_statistics as the first step and
// cross_entropy_rescale as the third save one pass over the logits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels {

namespace detail {
template <class Id>
bool counts(const Id* targets, std::int64_t row, const vocabulary_range& range, const cross_entropy_settings& s) {
  const auto target = static_cast<std::int64_t>(targets[row]);
  if (target == s.ignore_index) return false;
  if (target < 0 || target >= range.vocab) {
    fail({"cross_entropy: row ", row, " has target ", target, ", legal are 0 to ", range.vocab - 1,
          " and ignore_index = ", s.ignore_index});
  }
  return true;
}

/// A row without any valid column adds nothing, whatever its maximum.
template <class T>
PLAIT_ALWAYS_INLINE double sum_exp_of(const T* x, std::int64_t n, arithmetic<T> maximum) {
  return simd::sum_of<T>(
      n, [=](simd::pack<T> v) { return simd::exp<T>(v - maximum); }, x);
}

template <class T, class Id>
PLAIT_ALWAYS_INLINE void statistics_of_row(const T* x, Id target, statistic_of<T> maximum, statistic_of<T>& sum_exp,
                                           statistic_of<T>& target_logit, statistic_of<T>* sum_logits,
                                           const vocabulary_range& range) {
  using S = statistic_of<T>;
  const std::int64_t valid = range.valid();
  const std::int64_t at = static_cast<std::int64_t>(target) - range.first_column;
  sum_exp = static_cast<S>(sum_exp_of(x, valid, maximum));
  target_logit = at >= 0 && at < valid ? widened(x[at]) : S(0);
  if (sum_logits != nullptr) {
    *sum_logits = static_cast<S>(simd::sum_of<T>(
        valid, [](simd::pack<T> v) { return v; }, x));
  }
}
}  // namespace detail

/// row_max[r] over the valid local columns; -infinity if there are none.
template <class T>
void cross_entropy_max(cpu&, const T* logits, statistic_of<T>* row_max, std::int64_t rows,
                       const vocabulary_range& range) {
  const std::int64_t valid = range.valid();
  for (std::int64_t r = 0; r < rows; ++r) row_max[r] = simd::max_of(logits + r * range.columns, valid);
}

/// Computes per row, over the valid local columns: the sum of exp(x - max), the target's logit (0 if another rank has
/// it), and the sum of the logits. max is the maximum over the whole vocabulary. Only label smoothing needs the third
/// sum, which may otherwise be null. Throws `plait::error` for a target outside the vocabulary.
template <class T, class Id>
void cross_entropy_statistics(cpu&, const T* logits, const Id* targets, const statistic_of<T>* row_max,
                              statistic_of<T>* sum_exp, statistic_of<T>* target_logit, statistic_of<T>* sum_logits,
                              std::int64_t rows, const vocabulary_range& range,
                              const cross_entropy_settings& settings) {
  for (std::int64_t r = 0; r < rows; ++r) {
    detail::counts(targets, r, range, settings);
    detail::statistics_of_row(logits + r * range.columns, targets[r], row_max[r], sum_exp[r], target_logit[r],
                              sum_logits == nullptr ? nullptr : sum_logits + r, range);
  }
}

/// Computes `cross_entropy_max`, and `cross_entropy_statistics` relative to the local maximum, row by row, while a row
/// is in the cache. For a whole vocabulary these results are final.
template <class T, class Id>
void cross_entropy_local_statistics(cpu&, const T* logits, const Id* targets, statistic_of<T>* row_max,
                                    statistic_of<T>* sum_exp, statistic_of<T>* target_logit,
                                    statistic_of<T>* sum_logits, std::int64_t rows, const vocabulary_range& range,
                                    const cross_entropy_settings& settings) {
  for (std::int64_t r = 0; r < rows; ++r) {
    detail::counts(targets, r, range, settings);
    const T* const x = logits + r * range.columns;
    row_max[r] = simd::max_of(x, range.valid());
    detail::statistics_of_row(x, targets[r], row_max[r], sum_exp[r], target_logit[r],
                              sum_logits == nullptr ? nullptr : sum_logits + r, range);
  }
}

/// sum_exp[r] *= exp(local_max[r] - global_max[r]).
template <class T>
void cross_entropy_rescale(cpu&, const T* local_max, const T* global_max, T* sum_exp, std::int64_t rows) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const bool empty = local_max[r] == -std::numeric_limits<T>::infinity();
    sum_exp[r] = empty ? T(0) : sum_exp[r] * std::exp(local_max[r] - global_max[r]);
  }
}

/// loss[r] = (1 - eps) (lse - x_target) + eps (lse - mean x) + z lse^2, with lse = max + log(sum_exp). The statistics
/// are over the whole vocabulary. The loss of an ignored row is 0. sum_logits may be null without label smoothing.
template <class T, class Id>
void cross_entropy_loss(cpu&, const Id* targets, const T* row_max, const T* sum_exp, const T* target_logit,
                        const T* sum_logits, T* loss, std::int64_t rows, const vocabulary_range& range,
                        const cross_entropy_settings& s) {
  require(s.label_smoothing == 0.0 || sum_logits != nullptr, "cross_entropy_loss: label_smoothing needs sum_logits");
  for (std::int64_t r = 0; r < rows; ++r) {
    if (!detail::counts(targets, r, range, s)) {
      loss[r] = T(0);
      continue;
    }
    const double lse = static_cast<double>(row_max[r]) + std::log(static_cast<double>(sum_exp[r]));
    double value = (1.0 - s.label_smoothing) * (lse - static_cast<double>(target_logit[r])) + s.z_loss * lse * lse;
    if (s.label_smoothing != 0.0) {
      value += s.label_smoothing * (lse - static_cast<double>(sum_logits[r]) / static_cast<double>(range.vocab));
    }
    loss[r] = static_cast<T>(value);
  }
}

/// dlogits[r, c] = scale[r] ((1 + 2 z lse) softmax(c) - eps / vocab - (1 - eps) [c is the target]). scale[r] is the
/// gradient of loss[r]. dlogits are 0 in padding and ignored rows. dlogits may be logits.
template <class T, class Id>
void cross_entropy_backward(cpu&, const T* logits, const Id* targets, const statistic_of<T>* row_max,
                            const statistic_of<T>* sum_exp, const statistic_of<T>* scale, T* dlogits, std::int64_t rows,
                            const vocabulary_range& range, const cross_entropy_settings& s) {
  using A = arithmetic<T>;
  const std::int64_t valid = range.valid();
  for (std::int64_t r = 0; r < rows; ++r) {
    T* const d = dlogits + r * range.columns;
    if (!detail::counts(targets, r, range, s)) {
      std::fill_n(d, range.columns, T{});
      continue;
    }
    const auto total = static_cast<double>(sum_exp[r]), g = static_cast<double>(scale[r]);
    const double lse = static_cast<double>(row_max[r]) + std::log(total);
    const A factor = static_cast<A>(g * (1.0 + 2.0 * s.z_loss * lse) / total);
    const A uniform = static_cast<A>(g * s.label_smoothing / static_cast<double>(range.vocab));
    const A maximum = row_max[r];
    const T* const x = logits + r * range.columns;
    const auto gradient = [=](simd::pack<T> v) { return simd::exp<T>(v - maximum) * factor - uniform; };
    const std::int64_t at = static_cast<std::int64_t>(targets[r]) - range.first_column;
    const bool here = at >= 0 && at < valid;
    // The target's logit is read before d is written, because d may be x.
    const A of_target = here ? gradient(simd::splat(widened(x[at])))[0] : A(0);
    simd::transform(valid, d, gradient, x);
    std::fill(d + valid, d + range.columns, T{});
    if (here) d[at] = converted<T>(of_target - static_cast<A>(g * (1.0 - s.label_smoothing)));
  }
}

#define PLAIT_INSTANTIATE(T, Id)                                                                                       \
  PLAIT_COMPILED_TEMPLATE(void cross_entropy_statistics(                                                               \
      cpu&, const T*, const Id*, const statistic_of<T>*, statistic_of<T>*, statistic_of<T>*, statistic_of<T>*,         \
      std::int64_t, const vocabulary_range&, const cross_entropy_settings&))                                           \
  PLAIT_COMPILED_TEMPLATE(void cross_entropy_local_statistics(                                                         \
      cpu&, const T*, const Id*, statistic_of<T>*, statistic_of<T>*, statistic_of<T>*, statistic_of<T>*, std::int64_t, \
      const vocabulary_range&, const cross_entropy_settings&))                                                         \
  PLAIT_COMPILED_TEMPLATE(void cross_entropy_backward(                                                                 \
      cpu&, const T*, const Id*, const statistic_of<T>*, const statistic_of<T>*, const statistic_of<T>*, T*,           \
      std::int64_t, const vocabulary_range&, const cross_entropy_settings&))
PLAIT_INSTANTIATE(float, std::int32_t)
PLAIT_INSTANTIATE(float, std::int64_t)
PLAIT_INSTANTIATE(bf16, std::int32_t)
PLAIT_INSTANTIATE(bf16, std::int64_t)
PLAIT_INSTANTIATE(double, std::int32_t)
PLAIT_INSTANTIATE(double, std::int64_t)
#undef PLAIT_INSTANTIATE
PLAIT_COMPILED_TEMPLATE(void cross_entropy_loss(cpu&, const std::int32_t*, const float*, const float*, const float*,
                                                const float*, float*, std::int64_t, const vocabulary_range&,
                                                const cross_entropy_settings&))
PLAIT_COMPILED_TEMPLATE(void cross_entropy_loss(cpu&, const std::int64_t*, const float*, const float*, const float*,
                                                const float*, float*, std::int64_t, const vocabulary_range&,
                                                const cross_entropy_settings&))
PLAIT_COMPILED_TEMPLATE(void cross_entropy_loss(cpu&, const std::int32_t*, const double*, const double*, const double*,
                                                const double*, double*, std::int64_t, const vocabulary_range&,
                                                const cross_entropy_settings&))
PLAIT_COMPILED_TEMPLATE(void cross_entropy_loss(cpu&, const std::int64_t*, const double*, const double*, const double*,
                                                const double*, double*, std::int64_t, const vocabulary_range&,
                                                const cross_entropy_settings&))

}  // namespace plait::kernels

#include "plait/core/macros_on.hpp"
