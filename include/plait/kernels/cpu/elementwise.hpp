// Element-wise kernels of the CPU: arithmetic, casts, biases, activations, SwiGLU, strided copies and rotary positions.
// Outputs may be the array of an input. In bf16 each call rounds its result. Tests: tests/unit/kernels/elementwise.cpp,
// tests/unit/kernels/rope_embedding.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/types.hpp"
#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"
#include "plait/kernels/settings.hpp"
#include "plait/kernels/strided_copy.hpp"

namespace plait::kernels {

/// y = a + b
template <class T>
void add(cpu&, const T* a, const T* b, T* y, std::int64_t n) {
  simd::transform(
      n, y, [](simd::pack<T> v, simd::pack<T> w) { return v + w; }, a, b);
}

namespace detail {
/// Returns row r of x, or of x + addend, which it writes to `sum`.
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

/// y[r, c] += bias[c] for y [rows, columns], whose row stride is `stride` elements (0: columns).
template <class T>
void add_bias(cpu&, const T* bias, T* y, std::int64_t rows, std::int64_t columns, std::int64_t stride = 0) {
  for (std::int64_t r = 0; r < rows; ++r) {
    T* const row = y + r * (stride == 0 ? columns : stride);
    simd::transform(
        columns, row, [](simd::pack<T> v, simd::pack<T> b) { return v + b; }, row, bias);
  }
}

/// dbias[c] += sum over r of dy[r, c], whose row stride is `stride` elements (0: columns).
template <class T>
void bias_gradient(cpu&, const T* dy, gradient_of<T>* dbias, std::int64_t rows, std::int64_t columns,
                   std::int64_t stride = 0) {
  const std::int64_t row = stride == 0 ? columns : stride;
  simd::add_column_sums(rows, columns, dbias, [=](std::int64_t r, std::int64_t c) { return widened(dy[r * row + c]); });
}

// ---- activations -------------------------------------------------------------------------------------------------

namespace detail {

template <class T>
PLAIT_ALWAYS_INLINE simd::pack<T> sigmoid(simd::pack<T> x) {
  using A = arithmetic<T>;
  return A(1) / (simd::exp<T>(-x) + A(1));
}

/// tanh u = 1 - 2 / (e^2u + 1)
template <class T>
PLAIT_ALWAYS_INLINE simd::pack<T> tanh(simd::pack<T> u) {
  using A = arithmetic<T>;
  return A(1) - A(2) / (simd::exp<T>(u * A(2)) + A(1));
}

/// Returns Phi(x), the distribution function of the standard normal distribution.
template <class A>
A normal_distribution(A x) {
  return A(0.5) * (A(1) + std::erf(x * A(M_SQRT1_2)));
}

/// u and its derivative: 2 Phi(x) - 1 is nearly tanh(u(x)).
inline constexpr double root_2_over_pi = 0.79788456080286535588, gelu_cubic = 0.044715;
template <class T>
PLAIT_ALWAYS_INLINE simd::pack<T> gelu_tanh_input(simd::pack<T> x) {
  using A = arithmetic<T>;
  return A(root_2_over_pi) * (x + A(gelu_cubic) * x * x * x);
}
template <class T>
PLAIT_ALWAYS_INLINE simd::pack<T> gelu_tanh_slope(simd::pack<T> x) {
  using A = arithmetic<T>;
  return A(root_2_over_pi) * (A(3 * gelu_cubic) * x * x + A(1));
}

/// Returns f(x) for all functions except gelu.
template <activation_function Function, class T>
PLAIT_ALWAYS_INLINE simd::pack<T> activated(simd::pack<T> x) {
  using A = arithmetic<T>;
  using enum activation_function;
  if constexpr (Function == relu) {
    return x > simd::pack<T>{} ? x : simd::pack<T>{};
  } else if constexpr (Function == silu) {
    return x * sigmoid<T>(x);
  } else {
    return A(0.5) * x * (tanh<T>(gelu_tanh_input<T>(x)) + A(1));
  }
}
/// Returns dy f'(x) for all functions except gelu.
template <activation_function Function, class T>
PLAIT_ALWAYS_INLINE simd::pack<T> activation_gradient(simd::pack<T> x, simd::pack<T> dy) {
  using A = arithmetic<T>;
  using enum activation_function;
  if constexpr (Function == relu) {
    return x > simd::pack<T>{} ? dy : simd::pack<T>{};
  } else if constexpr (Function == silu) {
    const simd::pack<T> s = sigmoid<T>(x);
    return dy * s * (x * (A(1) - s) + A(1));
  } else {
    const simd::pack<T> t = tanh<T>(gelu_tanh_input<T>(x));
    return dy * (A(0.5) * (t + A(1)) + A(0.5) * x * (A(1) - t * t) * gelu_tanh_slope<T>(x));
  }
}

}  // namespace detail

/// y = f(x)
template <activation_function Function, class T>
void activation_forward(cpu&, const T* x, T* y, std::int64_t n) {
  if constexpr (Function == activation_function::gelu) {
    for (std::int64_t i = 0; i < n; ++i)
      y[i] = converted<T>(widened(x[i]) * detail::normal_distribution(widened(x[i])));
  } else {
    simd::transform(
        n, y, [](simd::pack<T> v) { return detail::activated<Function, T>(v); }, x);
  }
}
/// dx = dy f'(x) of the input x of the forward pass; dx may be the array of x or of dy.
template <activation_function Function, class T>
void activation_backward(cpu&, const T* x, const T* dy, T* dx, std::int64_t n) {
  if constexpr (Function == activation_function::gelu) {
    using A = arithmetic<T>;
    constexpr A density_at_0 = A(0.39894228040143267794);
    for (std::int64_t i = 0; i < n; ++i) {
      const A v = widened(x[i]);
      const A slope = detail::normal_distribution(v) + v * density_at_0 * std::exp(A(-0.5) * v * v);
      dx[i] = converted<T>(widened(dy[i]) * slope);
    }
  } else {
    simd::transform(
        n, dx, [](simd::pack<T> v, simd::pack<T> d) { return detail::activation_gradient<Function, T>(v, d); }, x, dy);
  }
}

// ---- SwiGLU ------------------------------------------------------------------------------------------------------
//
// SwiGLU (Shazeer 2020): y = silu(gate) * up. `gate_up` is [rows, 2, ffn]: a row holds its gate columns, then its up
// columns. y and dy are [rows, ffn]. The layer (nn/mlp.hpp) computes the matrix products before and after it.

template <class T>
void swiglu_forward(cpu&, const T* gate_up, T* y, std::int64_t rows, std::int64_t ffn) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const gate = gate_up + r * 2 * ffn;
    simd::transform(
        ffn, y + r * ffn, [](simd::pack<T> g, simd::pack<T> u) { return g * detail::sigmoid<T>(g) * u; }, gate,
        gate + ffn);
  }
}

/// dgate_up [rows, 2, ffn] from the forward input and dy; dgate_up may be the array of gate_up.
template <class T>
void swiglu_backward(cpu&, const T* gate_up, const T* dy, T* dgate_up, std::int64_t rows, std::int64_t ffn) {
  constexpr std::int64_t w = simd::lanes<T>;
  using A = arithmetic<T>;
  using pack = simd::pack<T>;
  const auto gradients = [](pack g, pack u, pack d, pack& dg, pack& du) {
    const pack s = detail::sigmoid<T>(g);
    du = d * g * s;
    dg = d * u * s * (g * (A(1) - s) + A(1));
  };
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const gate = gate_up + r * 2 * ffn;
    const T* const up = gate + ffn;
    const T* const d = dy + r * ffn;
    T* const dgate = dgate_up + r * 2 * ffn;
    pack dg, du;
    std::int64_t c = 0;
    for (; c + w <= ffn; c += w) {
      gradients(simd::load(gate + c), simd::load(up + c), simd::load(d + c), dg, du);
      simd::store<T>(dg, dgate + c);
      simd::store<T>(du, dgate + ffn + c);
    }
    if (const std::int64_t rest = ffn - c; rest > 0) {
      gradients(simd::load_some(gate + c, rest, 0), simd::load_some(up + c, rest, 0), simd::load_some(d + c, rest, 0),
                dg, du);
      simd::store_some<T>(dg, dgate + c, rest);
      simd::store_some<T>(du, dgate + ffn + c, rest);
    }
  }
}

// ---- strided copies ----------------------------------------------------------------------------------------------
//
// They pack a dim for a collective and unpack it afterwards. The device itself copies whole arrays (device/cpu.hpp).

/// Copies `rows` rows of `row_bytes` bytes; strides are the bytes between the starts of consecutive rows. Source and
/// destination must not overlap.
inline void copy_2d(cpu&, const void* from, void* to, std::int64_t rows, std::int64_t row_bytes,
                    std::int64_t from_stride, std::int64_t to_stride) {
  if (rows <= 0 || row_bytes <= 0) return;
  const auto* source = static_cast<const unsigned char*>(from);
  auto* target = static_cast<unsigned char*>(to);
  if (from_stride == row_bytes && to_stride == row_bytes) {
    std::memcpy(target, source, static_cast<std::size_t>(rows * row_bytes));
    return;
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(target + r * to_stride, source + r * from_stride, static_cast<std::size_t>(row_bytes));
  }
}

/// Copies `planes` planes of `rows` rows of `row_bytes` bytes. Each side has a byte stride for planes and one for rows.
/// It packs a middle dimension for a collective, and unpacks it.
inline void copy_3d(cpu& device, const void* from, void* to, std::int64_t planes, std::int64_t rows,
                    std::int64_t row_bytes, std::int64_t from_plane_stride, std::int64_t from_row_stride,
                    std::int64_t to_plane_stride, std::int64_t to_row_stride) {
  for (std::int64_t p = 0; p < planes; ++p) {
    copy_2d(device, static_cast<const unsigned char*>(from) + p * from_plane_stride,
            static_cast<unsigned char*>(to) + p * to_plane_stride, rows, row_bytes, from_row_stride, to_row_stride);
  }
}

/// Copies `part` from an array that holds the box `from` to one that holds the box `to`, with elements of
/// `element_bytes`. Both arrays are row-major without gaps, and `part` must lie in both boxes.
inline void copy_box(cpu&, const void* in, const box& from, void* out, const box& to, const box& part,
                     std::int64_t element_bytes) {
  const strided_copy copy = copy_of(from, to, part, element_bytes);
  const auto* const source = static_cast<const unsigned char*>(in) + offset_of(from, part.offset) * element_bytes;
  auto* const target = static_cast<unsigned char*>(out) + offset_of(to, part.offset) * element_bytes;
  const std::int64_t pieces = copy.pieces();
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    std::int64_t rest = piece, from_at = 0, to_at = 0;
    for (auto d = static_cast<std::size_t>(copy.dims - 1); d-- > 0;) {
      const std::int64_t index = rest % copy.size[d];
      rest /= copy.size[d];
      from_at += index * copy.from_stride[d];
      to_at += index * copy.to_stride[d];
    }
    std::memcpy(target + to_at, source + from_at, static_cast<std::size_t>(copy.piece_bytes()));
  }
}

// ---- rotary positions --------------------------------------------------------------------------------------------
//
// The rotate_half convention of Hugging Face: element i of a head is rotated with element i + head_dim / 2, by the
// angle position * frequency[i] (kernels/settings.hpp).

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

/// Writes to x [rows, heads, head_dim] the rotation of `from`, which may be x but must not overlap it otherwise.
/// `from_stride` and `row_stride` are the elements between their rows, so queries or keys inside a fused projection can
/// be rotated in place. Row r uses row r % table_rows of cosine and sine [table_rows, head_dim / 2]. If rows are batch
/// times sequence, pass the local sequence length.
template <class T>
void rope_forward(cpu&, const T* from, std::int64_t from_stride, T* x, const statistic_of<T>* cosine,
                  const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                  std::int64_t row_stride, std::int64_t table_rows) {
  detail::rotate<T>(from, from_stride, x, cosine, sine, rows, heads, head_dim, row_stride, table_rows, 1);
}

/// Turns the gradient of the rotated values into the gradient of the original ones by the inverse rotation. The arrays
/// are as for `rope_forward`.
template <class T>
void rope_backward(cpu&, const T* from, std::int64_t from_stride, T* dx, const statistic_of<T>* cosine,
                   const statistic_of<T>* sine, std::int64_t rows, std::int64_t heads, std::int64_t head_dim,
                   std::int64_t row_stride, std::int64_t table_rows) {
  detail::rotate<T>(from, from_stride, dx, cosine, sine, rows, heads, head_dim, row_stride, table_rows, -1);
}

PLAIT_COMPILED_TEMPLATE(void add(cpu&, const float*, const float*, float*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void accumulate(cpu&, const float*, float*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void swiglu_forward(cpu&, const float*, float*, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void swiglu_backward(cpu&, const float*, const float*, float*, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void add(cpu&, const bf16*, const bf16*, bf16*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void accumulate(cpu&, const bf16*, bf16*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void swiglu_forward(cpu&, const bf16*, bf16*, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void swiglu_backward(cpu&, const bf16*, const bf16*, bf16*, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void add(cpu&, const double*, const double*, double*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void accumulate(cpu&, const double*, double*, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void swiglu_forward(cpu&, const double*, double*, std::int64_t, std::int64_t))
PLAIT_COMPILED_TEMPLATE(void swiglu_backward(cpu&, const double*, const double*, double*, std::int64_t, std::int64_t))

}  // namespace plait::kernels
