// Activation functions and their gradients on the CPU. `backward` takes the input x of the forward pass and dy and
// writes dx, which may be the array of x or of dy. The layers are in nn/activation.hpp, the gated one is
// kernels/cpu/swiglu.hpp. Test: tests/unit/kernels/elementwise.cpp.
#pragma once

#include <cmath>
#include <cstdint>

#include "plait/device/cpu.hpp"
#include "plait/kernels/cpu/simd.hpp"

namespace plait::kernels {

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

}  // namespace plait::kernels
