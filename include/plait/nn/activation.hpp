// Activations, element by element, as a layer. SwiGLU is not among them, as its gate needs a product of its own:
// nn/mlp.hpp.
#pragma once

#include <cstdint>

#include "plait/layout/enforce.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/rules.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/layer_checks.hpp"
#include "plait/nn/other_arrays.hpp"

namespace plait {

// The functions that an `activation` layer applies; a program's own is a struct with the same two.

struct relu {
  template <class Device, class T>
  static void forward(Device& d, const T* x, T* y, std::int64_t n) {
    kernels::relu_forward(d, x, y, n);
  }
  template <class Device, class T>
  static void backward(Device& d, const T* x, const T* dy, T* dx, std::int64_t n) {
    kernels::relu_backward(d, x, dy, dx, n);
  }
};
/// x Phi(x), exact (Hendrycks and Gimpel 2016).
struct gelu {
  template <class Device, class T>
  static void forward(Device& d, const T* x, T* y, std::int64_t n) {
    kernels::gelu_forward(d, x, y, n);
  }
  template <class Device, class T>
  static void backward(Device& d, const T* x, const T* dy, T* dx, std::int64_t n) {
    kernels::gelu_backward(d, x, dy, dx, n);
  }
};
/// The approximation of gelu by tanh that GPT-2 uses.
struct gelu_tanh {
  template <class Device, class T>
  static void forward(Device& d, const T* x, T* y, std::int64_t n) {
    kernels::gelu_tanh_forward(d, x, y, n);
  }
  template <class Device, class T>
  static void backward(Device& d, const T* x, const T* dy, T* dx, std::int64_t n) {
    kernels::gelu_tanh_backward(d, x, dy, dx, n);
  }
};
struct silu {
  template <class Device, class T>
  static void forward(Device& d, const T* x, T* y, std::int64_t n) {
    kernels::silu_forward(d, x, y, n);
  }
  template <class Device, class T>
  static void backward(Device& d, const T* x, const T* dy, T* dx, std::int64_t n) {
    kernels::silu_backward(d, x, dy, dx, n);
  }
};

namespace detail {
template <class Spec>
struct nonlinear_value {
  static constexpr verdict value = pointwise(combine::nonlinear, {&layout_v<Spec>}).verdict;
};
}  // namespace detail

/// y = f(x), element by element. `Spec` must not be partial: f of a term of a pending sum is not a term of f's.
template <class Precision, class Function, spec_like Spec, compute_device Device = cpu>
class activation
    : public layer_types<activation_of<Precision>, Spec, Spec, Device>,
      public other_arrays<activation<Precision, Function, Spec, Device>, activation_of<Precision>, Spec, Spec, Device> {
  using T = activation_of<Precision>;
  static_assert(enforced<detail::nonlinear_value<Spec>, among<Spec>, Spec>);

 public:
  using other_arrays<activation, T, Spec, Spec, Device>::forward;
  using other_arrays<activation, T, Spec, Spec, Device>::backward;
  static constexpr bool cheap = true;
  struct saved {};

  tensor<T, Spec, Device> forward(const microbatch<Device>& mb, const tensor<T, Spec, Device>& x, saved* = nullptr) {
    tensor<T, Spec, Device> y(mb.ctx);
    detail::require_size("activation", "x", x.size(), y.size());
    Function::forward(mb.ctx.device, x.data(), y.data(), x.size());
    return y;
  }
  template <spec_like Gradient>
  tensor<T, dual_t<Spec>, Device> backward(const microbatch<Device>& mb, const tensor<T, Spec, Device>& x, saved&,
                                           const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, Spec>, among<Spec>, Gradient, Spec>);
    tensor<T, dual_t<Spec>, Device> dx(mb.ctx);
    detail::require_size("activation", "x", x.size(), dx.size());
    detail::require_size("activation", "dy", dy.size(), dx.size());
    Function::backward(mb.ctx.device, x.data(), dy.data(), dx.data(), x.size());
    return dx;
  }
  template <class F>
  void visit(F&&) {}
};

}  // namespace plait
