// Activation functions and SwiGLU, and their gradients, on the CPU. The layers are in nn/activation.hpp and nn/mlp.hpp.
#pragma once

#include <cmath>
#include <cstdint>

#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

// Activation functions: `backward` takes the input x of the forward pass and dy and writes dx, which may be the array
// of x or of dy. Test: tests/unit/kernels/elementwise.cpp.

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

inline constexpr double root_2_over_pi = 0.79788456080286535588;
inline constexpr double gelu_cubic = 0.044715;

}  // namespace detail

/// y = max(x, 0)
template <class T>
void relu_forward(cpu&, const T* x, T* y, std::int64_t n) {
  simd::transform(
      n, y, [](simd::pack<T> v) { return v > simd::pack<T>{} ? v : simd::pack<T>{}; }, x);
}

template <class T>
void relu_backward(cpu&, const T* x, const T* dy, T* dx, std::int64_t n) {
  simd::transform(
      n, dx, [](simd::pack<T> v, simd::pack<T> d) { return v > simd::pack<T>{} ? d : simd::pack<T>{}; }, x, dy);
}

/// y = x / (1 + e^-x)
template <class T>
void silu_forward(cpu&, const T* x, T* y, std::int64_t n) {
  simd::transform(
      n, y, [](simd::pack<T> v) { return v * detail::sigmoid<T>(v); }, x);
}

template <class T>
void silu_backward(cpu&, const T* x, const T* dy, T* dx, std::int64_t n) {
  using A = arithmetic<T>;
  simd::transform(
      n, dx,
      [](simd::pack<T> v, simd::pack<T> d) {
        const simd::pack<T> s = detail::sigmoid<T>(v);
        return d * s * (v * (A(1) - s) + A(1));
      },
      x, dy);
}

/// y = x Phi(x) with the exact normal distribution function Phi (Hendrycks and Gimpel 2016).
template <class T>
void gelu_forward(cpu&, const T* x, T* y, std::int64_t n) {
  using A = arithmetic<T>;
  for (std::int64_t i = 0; i < n; ++i) {
    const A v = widened(x[i]);
    y[i] = converted<T>(A(0.5) * v * (A(1) + std::erf(v * A(M_SQRT1_2))));
  }
}

template <class T>
void gelu_backward(cpu&, const T* x, const T* dy, T* dx, std::int64_t n) {
  using A = arithmetic<T>;
  constexpr A density_at_0 = A(0.39894228040143267794);
  for (std::int64_t i = 0; i < n; ++i) {
    const A v = widened(x[i]);
    const A distribution = A(0.5) * (A(1) + std::erf(v * A(M_SQRT1_2)));
    dx[i] = converted<T>(widened(dy[i]) * (distribution + v * density_at_0 * std::exp(A(-0.5) * v * v)));
  }
}

/// y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the approximation GPT-2 uses.
template <class T>
void gelu_tanh_forward(cpu&, const T* x, T* y, std::int64_t n) {
  using A = arithmetic<T>;
  simd::transform(
      n, y,
      [](simd::pack<T> v) {
        const simd::pack<T> u = A(detail::root_2_over_pi) * (v + A(detail::gelu_cubic) * v * v * v);
        return A(0.5) * v * (detail::tanh<T>(u) + A(1));
      },
      x);
}

template <class T>
void gelu_tanh_backward(cpu&, const T* x, const T* dy, T* dx, std::int64_t n) {
  using A = arithmetic<T>;
  simd::transform(
      n, dx,
      [](simd::pack<T> v, simd::pack<T> d) {
        const simd::pack<T> u = A(detail::root_2_over_pi) * (v + A(detail::gelu_cubic) * v * v * v);
        const simd::pack<T> du = A(detail::root_2_over_pi) * (A(3 * detail::gelu_cubic) * v * v + A(1));
        const simd::pack<T> t = detail::tanh<T>(u);
        return d * (A(0.5) * (t + A(1)) + A(0.5) * v * (A(1) - t * t) * du);
      },
      x, dy);
}

// SwiGLU (Shazeer 2020): y = silu(gate) * up. `gate_up` is [rows, 2, ffn]: a row holds its gate columns, then its up
// columns. y and dy are [rows, ffn]. The matrix products before and after it are the layer's, nn/mlp.hpp.

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

}  // namespace plait::kernels
