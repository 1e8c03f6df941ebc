// Arithmetic element by element on the CPU, casts, and biases of rows. Every array has n elements, where it is not
// said to have rows; outputs may be the same array as an input. In bf16 each call rounds its result. Sums are in
// kernels/cpu/reductions.hpp. Test: tests/unit/kernels/elementwise.cpp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/core/precision.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

/// y = a + b
template <class T>
void add(cpu&, const T* a, const T* b, T* y, std::int64_t n) {
  simd::transform(
      n, y, [](simd::pack<T> v, simd::pack<T> w) { return v + w; }, a, b);
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
  simd::transform(
      n, y, [](simd::pack<T> v, simd::pack<T> w) { return v + w; }, y, a);
}

/// y *= factor
template <class T>
void scale(cpu&, T* y, std::int64_t n, double factor) {
  simd::transform(
      n, y, [by = static_cast<arithmetic<T>>(factor)](simd::pack<T> v) { return v * by; }, y);
}

/// y += factor * x
template <class T>
void axpy(cpu&, const T* x, T* y, std::int64_t n, double factor) {
  simd::transform(
      n, y, [by = static_cast<arithmetic<T>>(factor)](simd::pack<T> v, simd::pack<T> w) { return v + by * w; }, y, x);
}

/// y = a * b
template <class T>
void multiply(cpu&, const T* a, const T* b, T* y, std::int64_t n) {
  simd::transform(
      n, y, [](simd::pack<T> v, simd::pack<T> w) { return v * w; }, a, b);
}

/// y = value, which may be of any number type.
template <class T, class Value>
void fill(cpu&, T* y, std::int64_t n, Value value) {
  const T same = converted<T>(value);
  for (std::int64_t i = 0; i < n; ++i) y[i] = same;
}

/// y = x in another type: float, double or bf16, rounded to nearest even (double to bf16 by way of float).
template <class From, class To>
void cast(cpu&, const From* x, To* y, std::int64_t n) {
  if constexpr (simd::lanes<From> == simd::lanes<To>) {
    simd::transform(
        n, y, [](simd::pack<From> v) { return v; }, x);
  } else {
    PLAIT_IVDEP
    for (std::int64_t i = 0; i < n; ++i) y[i] = converted<To>(x[i]);
  }
}

/// y[r, c] += bias[c] for y [rows, columns], whose rows are `stride` elements apart (0: columns).
template <class T>
void add_bias(cpu&, const T* bias, T* y, std::int64_t rows, std::int64_t columns, std::int64_t stride = 0) {
  for (std::int64_t r = 0; r < rows; ++r) {
    T* const row = y + r * (stride == 0 ? columns : stride);
    simd::transform(
        columns, row, [](simd::pack<T> v, simd::pack<T> b) { return v + b; }, row, bias);
  }
}

/// dbias[c] += sum over r of dy[r, c], whose rows are `stride` elements apart (0: columns).
template <class T>
void bias_gradient(cpu&, const T* dy, gradient_of<T>* dbias, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride = 0) {
  const std::int64_t row = stride == 0 ? columns : stride;
  simd::add_column_sums(rows, columns, dbias, [=](std::int64_t r, std::int64_t c) { return widened(dy[r * row + c]); });
}

}  // namespace plait::kernels
