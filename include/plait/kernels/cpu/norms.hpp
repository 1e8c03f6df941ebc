// RMS norm and layer norm on the CPU. Where a row lies on several ranks, the caller sums what a row's steps need over
// the ranks between the steps. The layers are in nn/norm.hpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "plait/core/compiled.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/elementwise.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

// RMS norm (Zhang and Sennrich 2019) on the CPU: y = x w inv_rms, where inv_rms[rows] = 1 / sqrt(mean(x^2) + eps) is
// kept for the backward pass. Where a row lies on several ranks, `columns` are the local ones, also of weights and
// their gradients, and `columns_global` all of them. The caller then sums `row_sum_squares` and `rms_norm_backward_dot`
// over the ranks between the halves. The layer is in nn/norm.hpp.

/// out[r] = sum over c of x[r, c]^2.
template <class T>
void row_sum_squares(cpu&, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns) {
  using S = statistic_of<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    out[r] = static_cast<S>(simd::sum_of<T>(
        columns, [](simd::pack<T> v) { return v * v; }, x + r * columns));
  }
}

/// inv_rms[r] from the sum of the squares of the whole row; inv_rms may be the array of sum_squares.
template <class S>
void rms_inverse(cpu&, const S* sum_squares, S* inv_rms, std::int64_t rows, std::int64_t columns_global, double eps) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const double mean = static_cast<double>(sum_squares[r]) / static_cast<double>(columns_global);
    inv_rms[r] = static_cast<S>(1.0 / std::sqrt(mean + eps));
  }
}

namespace detail {
template <class T>
PLAIT_ALWAYS_INLINE void rms_scale_row(const T* x, statistic_of<T> inverse, const T* weight, T* y,
                                       std::int64_t columns) {
  simd::transform(
      columns, y, [=](simd::pack<T> v, simd::pack<T> w) { return v * inverse * w; }, x, weight);
}

/// dx = inv (dy w - x inv^2 dot / columns_global) + addend, where dot is the row's sum of dy w x; addend may be null.
template <class T>
PLAIT_ALWAYS_INLINE void rms_row_dx(const T* x, const T* weight, const T* dy, statistic_of<T> inverse,
                                    statistic_of<T> dot, T* dx, std::int64_t columns, std::int64_t columns_global,
                                    const T* addend) {
  using S = statistic_of<T>;
  const S pull = static_cast<S>(static_cast<double>(dot) * static_cast<double>(inverse) * static_cast<double>(inverse) /
                                static_cast<double>(columns_global));
  if (addend == nullptr) {
    simd::transform(
        columns, dx, [=](simd::pack<T> v, simd::pack<T> w, simd::pack<T> d) { return inverse * (d * w - v * pull); }, x,
        weight, dy);
  } else {
    simd::transform(
        columns, dx,
        [=](simd::pack<T> v, simd::pack<T> w, simd::pack<T> d, simd::pack<T> a) {
          return inverse * (d * w - v * pull) + a;
        },
        x, weight, dy, addend);
  }
}

template <class T>
PLAIT_ALWAYS_INLINE statistic_of<T> rms_row_dot(const T* x, const T* weight, const T* dy, std::int64_t columns) {
  using S = statistic_of<T>;
  return static_cast<S>(simd::sum_of<T>(
      columns, [](simd::pack<T> v, simd::pack<T> w, simd::pack<T> d) { return d * w * v; }, x, weight, dy));
}
}  // namespace detail

/// y from the sums of the squares of the whole rows; y may be x.
template <class T>
void rms_apply(cpu&, const T* x, const statistic_of<T>* sum_squares, const T* weight, T* y, std::int64_t rows,
               std::int64_t columns, std::int64_t columns_global, double eps) {
  using S = statistic_of<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    const double mean = static_cast<double>(sum_squares[r]) / static_cast<double>(columns_global);
    const S inverse = static_cast<S>(1.0 / std::sqrt(mean + eps));
    detail::rms_scale_row(x + r * columns, inverse, weight, y + r * columns, columns);
  }
}

/// The whole forward pass where rows are whole; writes y and inv_rms. Where `addend` is not null, its input is x +
/// addend, which goes to `sum`; sum may be x.
template <class T>
void rms_norm_forward(cpu&, const T* x, const T* weight, T* y, statistic_of<T>* inv_rms, std::int64_t rows,
                      std::int64_t columns, double eps, const std::type_identity_t<T>* addend = nullptr,
                      std::type_identity_t<T>* sum = nullptr) {
  using S = statistic_of<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const row = detail::added_row(x, addend, sum, r, columns);
    const double squares = simd::sum_of<T>(
        columns, [](simd::pack<T> v) { return v * v; }, row);
    inv_rms[r] = static_cast<S>(1.0 / std::sqrt(squares / static_cast<double>(columns) + eps));
    detail::rms_scale_row(row, inv_rms[r], weight, y + r * columns, columns);
  }
}

/// dot[r] = sum over the local columns of dy w x.
template <class T>
void rms_norm_backward_dot(cpu&, const T* x, const T* weight, const T* dy, statistic_of<T>* dot, std::int64_t rows,
                           std::int64_t columns) {
  for (std::int64_t r = 0; r < rows; ++r) {
    dot[r] = detail::rms_row_dot(x + r * columns, weight, dy + r * columns, columns);
  }
}

/// dx from the dots of the whole rows, plus `addend` (such as the gradient of a residual connection) where that is not
/// null; dx may be dy, not addend.
template <class T>
void rms_norm_backward_dx(cpu&, const T* x, const T* weight, const T* dy, const statistic_of<T>* inv_rms,
                          const statistic_of<T>* dot, T* dx, std::int64_t rows, std::int64_t columns,
                          std::int64_t columns_global, const std::type_identity_t<T>* addend = nullptr) {
  for (std::int64_t r = 0; r < rows; ++r) {
    detail::rms_row_dx(x + r * columns, weight, dy + r * columns, inv_rms[r], dot[r], dx + r * columns, columns,
                       columns_global, addend == nullptr ? nullptr : addend + r * columns);
  }
}

/// dweight[c] += sum over r of dy x inv_rms.
template <class T>
void rms_norm_backward_dweight(cpu&, const T* x, const T* dy, const statistic_of<T>* inv_rms, gradient_of<T>* dweight,
                               std::int64_t rows, std::int64_t columns) {
  simd::add_column_sums(rows, columns, dweight, [=](std::int64_t r, std::int64_t c) {
    return widened(dy[r * columns + c]) * (widened(x[r * columns + c]) * inv_rms[r]);
  });
}

/// The whole backward pass where rows are whole. Either of dx and dweight may be null, which skips it; dweight is added
/// to, dx may be dy if dweight is null. `addend` (such as the gradient of a residual connection) is added to dx where
/// it is not null; it must not be dx.
template <class T>
void rms_norm_backward(cpu& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* inv_rms, T* dx,
                       gradient_of<T>* dweight, std::int64_t rows, std::int64_t columns,
                       const std::type_identity_t<T>* addend = nullptr) {
  using S = statistic_of<T>;
  if (dx != nullptr) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t at = r * columns;
      const S dot = detail::rms_row_dot(x + at, weight, dy + at, columns);
      detail::rms_row_dx(x + at, weight, dy + at, inv_rms[r], dot, dx + at, columns, columns,
                         addend == nullptr ? nullptr : addend + at);
    }
  }
  if (dweight != nullptr) rms_norm_backward_dweight(device, x, dy, inv_rms, dweight, rows, columns);
}

// Layer norm (Ba, Kiros and Hinton 2016) on the CPU: y = (x - mean) w / sqrt(variance + eps) + b, with the biased
// variance. Where a row lies on several ranks, `columns` are the local ones and `columns_global` all of them. The
// caller then sums `row_sums`, `row_centred_squares` and `layer_norm_backward_dots`, in this order, over the ranks
// between the steps. mean[rows] and inv_std[rows] are kept for the backward pass.

/// out[r] = sum over c of x[r, c].
template <class T>
void row_sums(cpu&, const T* x, statistic_of<T>* out, std::int64_t rows, std::int64_t columns) {
  using S = statistic_of<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    out[r] = static_cast<S>(simd::sum_of<T>(
        columns, [](simd::pack<T> v) { return v; }, x + r * columns));
  }
}

/// out[r] = sum over the local columns of (x - mean)^2, where mean = sums[r] / columns_global.
template <class T>
void row_centred_squares(cpu&, const T* x, const statistic_of<T>* sums, statistic_of<T>* out, std::int64_t rows,
                         std::int64_t columns, std::int64_t columns_global) {
  using S = statistic_of<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    const S mean = static_cast<S>(static_cast<double>(sums[r]) / static_cast<double>(columns_global));
    out[r] = static_cast<S>(simd::sum_of<T>(
        columns, [=](simd::pack<T> v) { return (v - mean) * (v - mean); }, x + r * columns));
  }
}

/// mean and inv_std of whole rows from the two reduced sums; either may be written over its source.
template <class S>
void layer_norm_statistics(cpu&, const S* sums, const S* centred_squares, S* mean, S* inv_std, std::int64_t rows,
                           std::int64_t columns_global, double eps) {
  const auto n = static_cast<double>(columns_global);
  for (std::int64_t r = 0; r < rows; ++r) {
    const double variance = static_cast<double>(centred_squares[r]) / n;
    mean[r] = static_cast<S>(static_cast<double>(sums[r]) / n);
    inv_std[r] = static_cast<S>(1.0 / std::sqrt(variance + eps));
  }
}

/// y = (x - mean) inv_std w + b; y may be x.
template <class T>
void layer_norm_apply(cpu&, const T* x, const statistic_of<T>* mean, const statistic_of<T>* inv_std, const T* weight,
                      const T* bias, T* y, std::int64_t rows, std::int64_t columns) {
  using S = statistic_of<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    const S m = mean[r], inverse = inv_std[r];
    simd::transform(
        columns, y + r * columns,
        [=](simd::pack<T> v, simd::pack<T> w, simd::pack<T> b) { return (v - m) * inverse * w + b; }, x + r * columns,
        weight, bias);
  }
}

/// The whole forward pass where rows are whole; writes y, mean and inv_std. Where `addend` is not null, its input is x
/// + addend, which goes to `sum`; sum may be x.
template <class T>
void layer_norm_forward(cpu& device, const T* x, const T* weight, const T* bias, T* y, statistic_of<T>* mean,
                        statistic_of<T>* inv_std, std::int64_t rows, std::int64_t columns, double eps,
                        const std::type_identity_t<T>* addend = nullptr, std::type_identity_t<T>* sum = nullptr) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const row = detail::added_row(x, addend, sum, r, columns);
    row_sums(device, row, mean + r, 1, columns);
    row_centred_squares(device, row, mean + r, inv_std + r, 1, columns, columns);
    layer_norm_statistics(device, mean + r, inv_std + r, mean + r, inv_std + r, 1, columns, eps);
    layer_norm_apply(device, row, mean + r, inv_std + r, weight, bias, y + r * columns, 1, columns);
  }
}

/// dots[r, 0] = sum of dy w and dots[r, 1] = sum of dy w (x - mean) inv_std over the local columns; dots is [rows, 2].
template <class T>
void layer_norm_backward_dots(cpu&, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                              const statistic_of<T>* inv_std, statistic_of<T>* dots, std::int64_t rows,
                              std::int64_t columns) {
  using S = statistic_of<T>;
  using pack = simd::pack<T>;
  for (std::int64_t r = 0; r < rows; ++r) {
    const S m = mean[r], inverse = inv_std[r];
    const T* const d_row = dy + r * columns;
    dots[2 * r] = static_cast<S>(simd::sum_of<T>(
        columns, [](pack w, pack d) { return d * w; }, weight, d_row));
    dots[2 * r + 1] = static_cast<S>(simd::sum_of<T>(
        columns, [=](pack v, pack w, pack d) { return d * w * ((v - m) * inverse); }, x + r * columns, weight, d_row));
  }
}

/// dx = inv_std (dy w - (dots[r, 0] + normalised x * dots[r, 1]) / columns_global) from the dots of the whole rows; dx
/// may be dy. `addend` (such as the gradient of a residual connection) is added where it is not null; it must not be
/// dx.
template <class T>
void layer_norm_backward_dx(cpu&, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                            const statistic_of<T>* inv_std, const statistic_of<T>* dots, T* dx, std::int64_t rows,
                            std::int64_t columns, std::int64_t columns_global,
                            const std::type_identity_t<T>* addend = nullptr) {
  using S = statistic_of<T>;
  using pack = simd::pack<T>;
  const auto n = static_cast<double>(columns_global);
  for (std::int64_t r = 0; r < rows; ++r) {
    const S m = mean[r], inverse = inv_std[r];
    const S shift = static_cast<S>(static_cast<double>(dots[2 * r]) / n);
    const S pull = static_cast<S>(static_cast<double>(dots[2 * r + 1]) / n);
    const auto gradient = [=](pack v, pack w, pack d) { return inverse * (d * w - shift - (v - m) * inverse * pull); };
    if (addend == nullptr) {
      simd::transform(columns, dx + r * columns, gradient, x + r * columns, weight, dy + r * columns);
    } else {
      simd::transform(
          columns, dx + r * columns, [=](pack v, pack w, pack d, pack a) { return gradient(v, w, d) + a; },
          x + r * columns, weight, dy + r * columns, addend + r * columns);
    }
  }
}

/// dweight[c] += sum over r of dy (x - mean) inv_std and dbias[c] += sum over r of dy; dbias may be null.
template <class T>
void layer_norm_backward_dweight(cpu&, const T* x, const T* dy, const statistic_of<T>* mean,
                                 const statistic_of<T>* inv_std, gradient_of<T>* dweight, gradient_of<T>* dbias,
                                 std::int64_t rows, std::int64_t columns) {
  simd::add_column_sums(rows, columns, dweight, [=](std::int64_t r, std::int64_t c) {
    return widened(dy[r * columns + c]) * ((widened(x[r * columns + c]) - mean[r]) * inv_std[r]);
  });
  if (dbias != nullptr) {
    simd::add_column_sums(rows, columns, dbias,
                          [=](std::int64_t r, std::int64_t c) { return widened(dy[r * columns + c]); });
  }
}

/// The whole backward pass where rows are whole. dx or dweight may be null, which skips it (dbias goes with dweight);
/// dweight and dbias are added to, dx may be dy if dweight is null. `addend` is added to dx where it is not null; it
/// must not be dx.
template <class T>
void layer_norm_backward(cpu& device, const T* x, const T* weight, const T* dy, const statistic_of<T>* mean,
                         const statistic_of<T>* inv_std, T* dx, gradient_of<T>* dweight, gradient_of<T>* dbias,
                         std::int64_t rows, std::int64_t columns, const std::type_identity_t<T>* addend = nullptr) {
  using S = statistic_of<T>;
  if (dx != nullptr) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t at = r * columns;
      S dots[2];
      layer_norm_backward_dots(device, x + at, weight, dy + at, mean + r, inv_std + r, dots, 1, columns);
      layer_norm_backward_dx(device, x + at, weight, dy + at, mean + r, inv_std + r, dots, dx + at, 1, columns, columns,
                             addend == nullptr ? nullptr : addend + at);
    }
  }
  if (dweight != nullptr) {
    layer_norm_backward_dweight(device, x, dy, mean, inv_std, dweight, dbias, rows, columns);
  }
}

#define PLAIT_INSTANTIATE(T)                                                                                        \
  PLAIT_COMPILED_TEMPLATE(void row_sum_squares(cpu&, const T*, statistic_of<T>*, std::int64_t, std::int64_t))       \
  PLAIT_COMPILED_TEMPLATE(void rms_apply(cpu&, const T*, const statistic_of<T>*, const T*, T*, std::int64_t,        \
                                         std::int64_t, std::int64_t, double))                                       \
  PLAIT_COMPILED_TEMPLATE(void rms_norm_forward(cpu&, const T*, const T*, T*, statistic_of<T>*, std::int64_t,       \
                                                std::int64_t, double, const T*, T*))                                \
  PLAIT_COMPILED_TEMPLATE(                                                                                          \
      void rms_norm_backward_dot(cpu&, const T*, const T*, const T*, statistic_of<T>*, std::int64_t, std::int64_t)) \
  PLAIT_COMPILED_TEMPLATE(void rms_norm_backward_dx(cpu&, const T*, const T*, const T*, const statistic_of<T>*,     \
                                                    const statistic_of<T>*, T*, std::int64_t, std::int64_t,         \
                                                    std::int64_t, const T*))                                        \
  PLAIT_COMPILED_TEMPLATE(void rms_norm_backward_dweight(cpu&, const T*, const T*, const statistic_of<T>*,          \
                                                         gradient_of<T>*, std::int64_t, std::int64_t))              \
  PLAIT_COMPILED_TEMPLATE(void rms_norm_backward(cpu&, const T*, const T*, const T*, const statistic_of<T>*, T*,    \
                                                 gradient_of<T>*, std::int64_t, std::int64_t, const T*))
PLAIT_INSTANTIATE(float)
PLAIT_INSTANTIATE(bf16)
PLAIT_INSTANTIATE(double)
#undef PLAIT_INSTANTIATE

}  // namespace plait::kernels
