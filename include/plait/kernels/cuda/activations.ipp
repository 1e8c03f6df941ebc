// The kernels and launches of kernels/cuda/activations.hpp, which includes this where CUDA is compiled.
#pragma once

#include <cmath>

#include "plait/kernels/cuda/chunk.hpp"
#include "plait/kernels/cuda/sigmoid.hpp"

namespace plait::kernels {

namespace detail {

__device__ inline float exponential(float x) { return ::expf(x); }
__device__ inline double exponential(double x) { return ::exp(x); }
__device__ inline float error_function(float x) { return ::erff(x); }
__device__ inline double error_function(double x) { return ::erf(x); }
__device__ inline float hyperbolic_tangent(float x) { return ::tanhf(x); }
__device__ inline double hyperbolic_tangent(double x) { return ::tanh(x); }

struct relu {
  template <class S>
  __device__ S operator()(S x) const {
    return x > S(0) ? x : S(0);
  }
};
struct relu_gradient {
  template <class S>
  __device__ S operator()(S x, S dy) const {
    return x > S(0) ? dy : S(0);
  }
};

template <class T>
struct silu {
  using S = arithmetic<T>;
  __device__ S operator()(S x) const { return x * logistic<T>(x); }
};
template <class T>
struct silu_gradient {
  using S = arithmetic<T>;
  __device__ S operator()(S x, S dy) const {
    const S s = logistic<T>(x);
    return dy * s * (x * (S(1) - s) + S(1));
  }
};

inline constexpr double root_half = 0.70710678118654752440;

struct gelu {
  template <class S>
  __device__ S operator()(S x) const {
    return S(0.5) * x * (S(1) + error_function(x * S(root_half)));
  }
};
struct gelu_gradient {
  template <class S>
  __device__ S operator()(S x, S dy) const {
    constexpr S density_at_0 = S(0.39894228040143267794);
    const S distribution = S(0.5) * (S(1) + error_function(x * S(root_half)));
    return dy * (distribution + x * density_at_0 * exponential(S(-0.5) * x * x));
  }
};

/// u = slope (x + cubic x^3), whose tanh approximates 2 Phi(x) - 1.
template <class S>
struct gelu_curve {
  static constexpr S slope = S(0.79788456080286535588);  // sqrt(2 / pi)
  static constexpr S cubic = S(0.044715);
};

struct gelu_tanh {
  template <class S>
  __device__ S operator()(S x) const {
    using curve = gelu_curve<S>;
    return S(0.5) * x * (hyperbolic_tangent(curve::slope * (x + curve::cubic * x * x * x)) + S(1));
  }
};
struct gelu_tanh_gradient {
  template <class S>
  __device__ S operator()(S x, S dy) const {
    using curve = gelu_curve<S>;
    const S t = hyperbolic_tangent(curve::slope * (x + curve::cubic * x * x * x));
    const S du = curve::slope * (S(3) * curve::cubic * x * x + S(1));
    return dy * (S(0.5) * (t + S(1)) + S(0.5) * x * (S(1) - t * t) * du);
  }
};

}  // namespace detail

template <class T>
void relu_forward(cuda& device, const T* x, T* y, std::int64_t n) {
  detail::map(device, n, detail::relu{}, y, x);
}
template <class T>
void relu_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n) {
  detail::map(device, n, detail::relu_gradient{}, dx, x, dy);
}

template <class T>
void silu_forward(cuda& device, const T* x, T* y, std::int64_t n) {
  detail::map(device, n, detail::silu<T>{}, y, x);
}
template <class T>
void silu_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n) {
  detail::map(device, n, detail::silu_gradient<T>{}, dx, x, dy);
}

template <class T>
void gelu_forward(cuda& device, const T* x, T* y, std::int64_t n) {
  detail::map(device, n, detail::gelu{}, y, x);
}
template <class T>
void gelu_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n) {
  detail::map(device, n, detail::gelu_gradient{}, dx, x, dy);
}

template <class T>
void gelu_tanh_forward(cuda& device, const T* x, T* y, std::int64_t n) {
  detail::map(device, n, detail::gelu_tanh{}, y, x);
}
template <class T>
void gelu_tanh_backward(cuda& device, const T* x, const T* dy, T* dx, std::int64_t n) {
  detail::map(device, n, detail::gelu_tanh_gradient{}, dx, x, dy);
}

}  // namespace plait::kernels
