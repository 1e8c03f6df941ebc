// Functions of one element at a time: activation layers, and dropout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/rules.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/tensor/sequence_order.hpp"

namespace plait {

// The functions that an `activation` layer applies. A program's own function is a struct with these two members.

template <kernels::activation_function Function>
struct known_function {
  template <class Device, class T>
  static void forward(Device& d, const T* x, T* y, std::int64_t n) {
    kernels::activation_forward<Function>(d, x, y, n);
  }
  template <class Device, class T>
  static void backward(Device& d, const T* x, const T* dy, T* dx, std::int64_t n) {
    kernels::activation_backward<Function>(d, x, dy, dx, n);
  }
};

struct relu : known_function<kernels::activation_function::relu> {};
struct gelu : known_function<kernels::activation_function::gelu> {};
struct gelu_tanh : known_function<kernels::activation_function::gelu_tanh> {};
struct silu : known_function<kernels::activation_function::silu> {};

namespace detail {
template <class Spec>
struct nonlinear_value {
  static constexpr verdict value = pointwise(combine::nonlinear, {&layout_v<Spec>}).verdict;
};
}  // namespace detail

/// y = f(x), element by element. `Spec` must not be partial: f of a term of a sum is not a term of f of the sum.
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

// Dropout with equal masks on every mesh, in place.

/// Dropout with counter-based random numbers. An element's mask depends on the seed, the layer's name, its sample's
/// global index and its place in the sample, but not on the mesh. The backward pass needs no kept values. The leading
/// dim counts samples. Tokens in zigzag order have the same masks as in original order. `Spec` must not be partial,
/// because dropout is applied to the complete sum.
template <class T, spec_like Spec, compute_device Device = cpu>
class dropout {
 public:
  using input = Spec;
  using output = Spec;
  static_assert(enforced<detail::nonlinear_value<Spec>, among<Spec>, Spec>);

  /// Drops elements with probability `p`, 0 <= p < 1. `order` is the order of the sequence dim `zseq`, if the tensor
  /// has it.
  dropout(double p, std::string_view name, sequence_order order = {})
      : p_(p), stream_(parameter<T, Device>::stream_of(name)), names_(name), order_(order) {
    kernels::check_dropout(p);
    if (p > 0 && zigzag_at >= 0 && order.length() == 0)
      fail({name, ": dropout of tokens in zigzag order needs their sequence_order"});
  }

  /// Works in place; does nothing if `mb.drops` is false.
  void forward(const microbatch<Device>& mb, tensor<T, Spec, Device>& x) const {
    if (!drops(mb)) return;
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.forward());
    each_part(mb, x.part(), [&](const box& part, std::int64_t at) {
      kernels::dropout_forward(ctx.device, x.data() + at, x.data() + at, part, ctx.seed, stream_, p_);
    });
  }
  template <spec_like Gradient>
  void backward(const microbatch<Device>& mb, tensor<T, Gradient, Device>& dy) const {
    static_assert(enforced<detail::dual_value_check<Gradient, Spec>, among<Spec>, Gradient, Spec>);
    if (!drops(mb)) return;
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, names_.backward());
    each_part(mb, dy.part(), [&](const box& part, std::int64_t at) {
      kernels::dropout_backward(ctx.device, dy.data() + at, dy.data() + at, part, ctx.seed, stream_, p_);
    });
  }
  double probability() const { return p_; }
  bool drops(const microbatch<Device>& mb) const { return p_ > 0 && mb.drops; }

 private:
  static constexpr int zigzag_at = layout_v<Spec>.find(dim_of<zseq>);

  /// Calls f(part, offset) for parts of the local array that are boxes in original order; samples are counted over all
  /// steps.
  template <class F>
  void each_part(const microbatch<Device>& mb, box part, F&& f) const {
    part.offset[0] += mb.first_sample;
    part.global[0] += mb.first_sample;
    if (zigzag_at < 0 || order_.is_text()) return f(part, std::int64_t{0});
    constexpr auto z = static_cast<std::size_t>(zigzag_at < 0 ? 0 : zigzag_at);
    std::int64_t outer = 1, inner = 1;
    for (std::size_t d = 0; d < static_cast<std::size_t>(part.dims); ++d)
      if (d != z) (static_cast<int>(d) < zigzag_at ? outer : inner) *= part.local[d];
    const std::vector<token_run> runs = order_.runs(part.offset[z], part.local[z]);
    for (std::int64_t i = 0; i < outer; ++i) {
      box row = part;
      std::int64_t rest = i;
      for (std::size_t d = z; d-- > 0;) {
        row.offset[d] += rest % part.local[d];
        row.local[d] = 1;
        rest /= part.local[d];
      }
      for (const token_run& r : runs) {
        row.offset[z] = r.position;
        row.local[z] = r.length;
        f(row, (i * part.local[z] + r.at) * inner);
      }
    }
  }

  double p_;
  std::uint64_t stream_;
  detail::layer_names names_;
  sequence_order order_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
