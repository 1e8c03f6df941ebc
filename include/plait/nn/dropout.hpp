#pragma once

#include <string_view>

#include "plait/nn/linear.hpp"

namespace plait {
namespace detail {
template <class Spec>
struct nonlinear_value {
  static constexpr verdict value = pointwise(combine::nonlinear, {&layout_v<Spec>}).verdict;
};
}  // namespace detail

/// Dropout with counter-based random numbers: an element's mask depends on the seed, the layer's name, the global index
/// of its sample and its place in the sample, not on the mesh; nothing is kept for the backward pass. The leading dim
/// counts samples. `Spec` must not be partial: dropping terms of a pending sum independently is another function.
template <class T, spec_like Spec, compute_device Device = cpu>
class dropout {
 public:
  using input = Spec;
  using output = Spec;
  static_assert(enforced<detail::nonlinear_value<Spec>, among<Spec>, Spec>);

  /// Elements are dropped with probability `p`, 0 <= p < 1.
  dropout(double p, std::string_view name) : p_(p), stream_(parameter_base<T, Device>::stream_of(name)), names_(name) {
    kernels::check_dropout(p);
  }

  /// In place.
  void forward(context<Device>& ctx, tensor<T, Spec, Device>& x) const {
    if (p_ == 0) return;
    const range shown(ctx.device, names_.forward());
    kernels::dropout_forward(ctx.device, x.data(), x.data(), samples(ctx, x.part()), ctx.seed, stream_, p_);
  }
  template <spec_like Gradient>
  void backward(context<Device>& ctx, tensor<T, Gradient, Device>& dy) const {
    static_assert(enforced<detail::dual_value_check<Gradient, Spec>, among<Spec>, Gradient, Spec>);
    if (p_ == 0) return;
    const range shown(ctx.device, names_.backward());
    kernels::dropout_backward(ctx.device, dy.data(), dy.data(), samples(ctx, dy.part()), ctx.seed, stream_, p_);
  }
  double probability() const { return p_; }

 private:
  static box samples(const context<Device>& ctx, box part) {
    part.offset[0] += ctx.first_sample;
    part.global[0] += ctx.first_sample;
    return part;
  }

  double p_;
  std::uint64_t stream_;
  range_names names_;
};

}  // namespace plait
