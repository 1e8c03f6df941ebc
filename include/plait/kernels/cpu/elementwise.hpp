// Arithmetic element by element on the CPU, casts, and biases of rows. Every array has n elements, where it is not
// said to have rows; outputs may be the same array as an input. Sums are in kernels/cpu/reductions.hpp. Test:
// tests/unit/kernels/elementwise.cpp.
#pragma once

#include <bit>
#include <cstdint>

#include "plait/core/dtype.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

/// y = a + b
template <class T>
void add(cpu&, const T* a, const T* b, T* y, std::int64_t n) {
  PLAIT_IVDEP
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
}

namespace detail {
/// Row r of x, or of x + addend, which is written to `sum`.
template <class T>
PLAIT_ALWAYS_INLINE const T* added_row(const T* x, const T* addend, T* sum, std::int64_t r, std::int64_t columns) {
  const std::int64_t at = r * columns;
  if (addend == nullptr) return x + at;
  simd::transform(
      columns, sum + at, [](simd::pack<T> v, simd::pack<T> a) { return v + a; }, x + at, addend + at);
  return sum + at;
}
}  // namespace detail

/// y += a
template <class T>
void accumulate(cpu&, const T* a, T* y, std::int64_t n) {
  PLAIT_IVDEP
  for (std::int64_t i = 0; i < n; ++i) y[i] += a[i];
}

/// y *= factor
template <class T>
void scale(cpu&, T* y, std::int64_t n, T factor) {
  PLAIT_IVDEP
  for (std::int64_t i = 0; i < n; ++i) y[i] *= factor;
}

/// y += factor * x
template <class T>
void axpy(cpu&, const T* x, T* y, std::int64_t n, T factor) {
  PLAIT_IVDEP
  for (std::int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

/// y = a * b
template <class T>
void multiply(cpu&, const T* a, const T* b, T* y, std::int64_t n) {
  PLAIT_IVDEP
  for (std::int64_t i = 0; i < n; ++i) y[i] = a[i] * b[i];
}

/// y = value
template <class T>
void fill(cpu&, T* y, std::int64_t n, T value) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = value;
}

namespace detail {
template <class To, class From>
PLAIT_ALWAYS_INLINE To converted(From x) {
  if constexpr (std::is_same_v<To, bf16> && std::is_same_v<From, bf16>) {
    return x;
  } else if constexpr (std::is_same_v<To, bf16>) {
    return to_bf16(static_cast<float>(x));
  } else if constexpr (std::is_same_v<From, bf16>) {
    return static_cast<To>(to_float(x));
  } else {
    return static_cast<To>(x);
  }
}
}  // namespace detail

/// y = x in another type: float, double or bf16, rounded to nearest even (double to bf16 by way of float).
template <class From, class To>
void cast(cpu&, const From* x, To* y, std::int64_t n) {
  PLAIT_IVDEP
  for (std::int64_t i = 0; i < n; ++i) y[i] = detail::converted<To>(x[i]);
}

/// y[r, c] += bias[c] for y [rows, columns], whose rows are `stride` elements apart (0: columns).
template <class T>
void add_bias(cpu&, const T* bias, T* y, std::int64_t rows, std::int64_t columns, std::int64_t stride = 0) {
  for (std::int64_t r = 0; r < rows; ++r) {
    T* const row = y + r * (stride == 0 ? columns : stride);
    PLAIT_IVDEP
    for (std::int64_t c = 0; c < columns; ++c) row[c] += bias[c];
  }
}

/// dbias[c] += sum over r of dy[r, c], whose rows are `stride` elements apart (0: columns).
template <class T>
void bias_gradient(cpu&, const T* dy, T* dbias, std::int64_t rows, std::int64_t columns, std::int64_t stride = 0) {
  const std::int64_t row = stride == 0 ? columns : stride;
  simd::add_column_sums(rows, columns, dbias, [=](std::int64_t r, std::int64_t c) { return dy[r * row + c]; });
}

}  // namespace plait::kernels
