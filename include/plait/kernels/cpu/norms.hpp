// Norms of rows on the CPU: RMS norm and layer norm. The layers are in nn/norm.hpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/settings.hpp"

namespace plait::kernels {

// Layer norm (Ba, Kiros and Hinton 2016): y = (x - mean) inverse w + b, where inverse = 1 / sqrt(variance + eps), with
// the biased variance. RMS norm (Zhang and Sennrich 2019) has neither mean nor bias: y = x inverse w, where inverse = 1
// / sqrt(mean(x^2) + eps). All kernels compute RMS norm if `mean`, `sums`, `bias` and `dbias` are null. The backward
// pass needs mean [rows] and inverse [rows].
//
// If a row is divided over several ranks, `columns` counts the local columns, also of weights and their gradients, and
// `columns_global` all of them. The caller then sums the results of `row_sums`, `row_squares` and `norm_backward_dots`,
// in this order, over the ranks between the steps.

namespace detail {

/// The mean and the inverse of one row.
template <bool Centred, class T>
struct row_moments {
  statistic_of<T> mean = 0, inverse;

  row_moments(const statistic_of<T>* means, const statistic_of<T>* inverses, std::int64_t r) : inverse(inverses[r]) {
    if constexpr (Centred) mean = means[r];
  }
  PLAIT_ALWAYS_INLINE simd::pack<T> centre(simd::pack<T> x) const {
    if constexpr (Centred) x -= mean;
    return x;
  }
};

}  // namespace detail

/// out[r] = sum over c of x[r, c].
template <class T>
void row_sums(cpu&, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns) {
  using S = statistic_of<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    out[r] = static_cast<S>(simd::sum_of<T>(
        columns, [](simd::pack<T> v) { return v; }, x + r * columns));
  }
}

/// out[r] = sum over the local columns of (x - mean)^2, where mean = sums[r] / columns_global, or 0.
template <class T>
void row_squares(cpu&, const T* x, const statistic_of<T>* sums, statistic_of<T>* out, std::int64_t rows,
                 std::int64_t columns, std::int64_t columns_global) {
  using S = statistic_of<T>;
  const auto n = static_cast<double>(columns_global);
  for (std::int64_t r = 0; r < rows; ++r) {
    const S mean = sums == nullptr ? S(0) : static_cast<S>(static_cast<double>(sums[r]) / n);
    out[r] = static_cast<S>(simd::sum_of<T>(
        columns, [=](simd::pack<T> v) { return (v - mean) * (v - mean); }, x + r * columns));
  }
}

/// Computes mean and inverse of whole rows from the reduced sums; either may overwrite its source.
template <class S>
void norm_statistics(cpu&, const std::type_identity_t<S>* sums, const S* squares, std::type_identity_t<S>* mean,
                     S* inverse, std::int64_t rows, std::int64_t columns_global, double eps) {
  const auto n = static_cast<double>(columns_global);
  for (std::int64_t r = 0; r < rows; ++r) {
    if (mean != nullptr) mean[r] = static_cast<S>(static_cast<double>(sums[r]) / n);
    inverse[r] = static_cast<S>(1.0 / std::sqrt(static_cast<double>(squares[r]) / n + eps));
  }
}

/// y = (x - mean) inverse w + b; y may be x.
template <class T>
void norm_apply(cpu&, const T* x, const statistic_of<T>* mean, const statistic_of<T>* inverse, const T* weight,
                const std::type_identity_t<T>* bias, T* y, std::int64_t rows, std::int64_t columns) {
  using pack = simd::pack<T>;
  detail::with_centre(mean, [&](auto centred) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const detail::row_moments<centred, T> of(mean, inverse, r);
      const auto scaled = [=](pack v, pack w) { return of.centre(v) * of.inverse * w; };
      if constexpr (centred) {
        simd::transform(
            columns, y + r * columns, [=](pack v, pack w, pack b) { return scaled(v, w) + b; }, x + r * columns, weight,
            bias);
      } else {
        simd::transform(columns, y + r * columns, scaled, x + r * columns, weight);
      }
    }
  });
}

/// The whole forward pass for whole rows; writes y, mean and inverse. If `addend` is not null, the input is x + addend,
/// rounded to T and written to `sum`; sum may be x.
template <class T>
void norm_forward(cpu& device, const T* x, const T* weight, const std::type_identity_t<T>* bias, T* y,
                  statistic_of<T>* mean, statistic_of<T>* inverse, std::int64_t rows, std::int64_t columns, double eps,
                  const std::type_identity_t<T>* addend = nullptr, std::type_identity_t<T>* sum = nullptr) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const row = detail::added_row(x, addend, sum, r, columns);
    statistic_of<T>*const centre = mean == nullptr ? nullptr : mean + r, *const root = inverse + r;
    if (centre != nullptr) row_sums(device, row, centre, 1, columns);
    row_squares(device, row, centre, root, 1, columns, columns);
    norm_statistics(device, centre, root, centre, root, 1, columns, eps);
    norm_apply(device, row, centre, root, weight, bias, y + r * columns, 1, columns);
  }
}

/// dots [rows, 2], or [rows, 1] without a mean: the sums over the local columns of dy w (x - mean) inverse, and then of
/// dy w.
template <class T>
void norm_backward_dots(cpu&, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                        const statistic_of<T>* inverse, statistic_of<T>* dots, std::int64_t rows,
                        std::int64_t columns) {
  using S = statistic_of<T>;
  using pack = simd::pack<T>;
  detail::with_centre(mean, [&](auto centred) {
    for (std::int64_t r = 0; r < rows; ++r, dots += centred ? 2 : 1) {
      const detail::row_moments<centred, T> of(mean, inverse, r);
      const T* const d_row = dy + r * columns;
      const double dot = simd::sum_of<T>(
          columns, [=](pack v, pack w, pack d) { return d * w * of.centre(v); }, x + r * columns, weight, d_row);
      dots[0] = static_cast<S>(dot * static_cast<double>(of.inverse));
      if constexpr (centred) {
        dots[1] = static_cast<S>(simd::sum_of<T>(
            columns, [](pack w, pack d) { return d * w; }, weight, d_row));
      }
    }
  });
}

/// dx = inverse (dy w - (dots[r, 1] + normalised x * dots[r, 0]) / columns_global) from the dots of the whole rows; dx
/// may be dy. `addend` (such as the gradient of a residual connection), if not null, is added; it must not be dx.
template <class T>
void norm_backward_dx(cpu&, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                      const statistic_of<T>* inverse, const statistic_of<T>* dots, T* dx, std::int64_t rows,
                      std::int64_t columns, std::int64_t columns_global,
                      const std::type_identity_t<T>* addend = nullptr) {
  using S = statistic_of<T>;
  using pack = simd::pack<T>;
  const auto n = static_cast<double>(columns_global);
  detail::with_centre(mean, [&](auto centred) {
    for (std::int64_t r = 0; r < rows; ++r, dots += centred ? 2 : 1) {
      const std::int64_t at = r * columns;
      const detail::row_moments<centred, T> of(mean, inverse, r);
      const S pull = static_cast<S>(static_cast<double>(dots[0]) * static_cast<double>(of.inverse) / n);
      const S shift = centred ? static_cast<S>(static_cast<double>(dots[1]) / n) : S(0);
      const auto gradient = [=](pack v, pack w, pack d) { return of.inverse * (d * w - shift - of.centre(v) * pull); };
      if (addend == nullptr) {
        simd::transform(columns, dx + at, gradient, x + at, weight, dy + at);
      } else {
        simd::transform(
            columns, dx + at, [=](pack v, pack w, pack d, pack a) { return gradient(v, w, d) + a; }, x + at, weight,
            dy + at, addend + at);
      }
    }
  });
}

/// dweight[c] += sum over r of dy (x - mean) inverse and dbias[c] += sum over r of dy; dbias may be null.
template <class T>
void norm_backward_dweight(cpu& device, const T* x, const T* dy, const statistic_of<T>* mean,
                           const statistic_of<T>* inverse, gradient_of<T>* dweight, gradient_of<T>* dbias,
                           std::int64_t rows, std::int64_t columns) {
  detail::with_centre(mean, [&](auto centred) {
    simd::add_column_sums(rows, columns, dweight, [=](std::int64_t r, std::int64_t c) {
      auto v = widened(x[r * columns + c]);
      if constexpr (centred) v -= mean[r];
      return widened(dy[r * columns + c]) * (v * inverse[r]);
    });
  });
  if (dbias != nullptr) bias_gradient(device, dy, dbias, rows, columns);
}

/// The whole backward pass for whole rows. If dx or dweight is null, it is not computed (dbias is computed with
/// dweight). dweight and dbias are added to; dx may be dy if dweight is null. `addend`, if not null, is added to dx; it
/// must not be dx.
template <class T>
void norm_backward(cpu& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                   const statistic_of<T>* inverse, T* dx, gradient_of<T>* dweight, gradient_of<T>* dbias,
                   std::int64_t rows, std::int64_t columns, const std::type_identity_t<T>* addend = nullptr) {
  for (std::int64_t r = 0; r < rows && dx != nullptr; ++r) {
    const std::int64_t at = r * columns;
    const statistic_of<T>*const centre = mean == nullptr ? nullptr : mean + r, *const root = inverse + r;
    statistic_of<T> dots[2];
    norm_backward_dots(device, x + at, weight, dy + at, centre, root, dots, 1, columns);
    norm_backward_dx(device, x + at, weight, dy + at, centre, root, dots, dx + at, 1, columns, columns,
                     addend == nullptr ? nullptr : addend + at);
  }
  if (dweight != nullptr) norm_backward_dweight(device, x, dy, mean, inverse, dweight, dbias, rows, columns);
}

#define PLAIT_INSTANTIATE(T)                                                                                     \
  PLAIT_COMPILED_TEMPLATE(void norm_forward(cpu&, const T*, const T*, const T*, T*, statistic_of<T>*,            \
                                            statistic_of<T>*, std::int64_t, std::int64_t, double, const T*, T*)) \
  PLAIT_COMPILED_TEMPLATE(void norm_backward_dweight(cpu&, const T*, const T*, const statistic_of<T>*,           \
                                                     const statistic_of<T>*, gradient_of<T>*, gradient_of<T>*,   \
                                                     std::int64_t, std::int64_t))                                \
  PLAIT_COMPILED_TEMPLATE(void norm_backward(cpu&, const T*, const T*, const T*, const statistic_of<T>*,         \
                                             const statistic_of<T>*, T*, gradient_of<T>*, gradient_of<T>*,       \
                                             std::int64_t, std::int64_t, const T*))
PLAIT_INSTANTIATE(float)
PLAIT_INSTANTIATE(bf16)
PLAIT_INSTANTIATE(double)
#undef PLAIT_INSTANTIATE

}  // namespace plait::kernels
