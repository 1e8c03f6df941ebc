#pragma once

#include <span>
#include <string>
#include <vector>

#include "plait/kernels/kernels.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {
namespace detail {

/// A gradient that may update a parameter stored as `Stored`: complete on every axis, and of the dual spec.
template <class Stored, class Gradient>
struct optimizer_value {
  static constexpr verdict value = [] {
    const layout stored = layout_v<Stored>, gradient = layout_v<Gradient>;
    verdict v;
    for (axis_id axis : gradient.partial)
      v.worsen({rule::unresolved_partial, axis, {}, state::partial, dual(stored.state_of(axis))});
    if (!v.ok()) return v;
    if (!(gradient.dim_order() == stored.dim_order())) return verdict{rule::dims_differ, {}, stored.dims[0].dim};
    for (axis_id axis : differing_axes(gradient, dual(stored)))
      v.worsen(
          {rule::wrong_dual, axis, gradient.sharded_by(axis), gradient.state_of(axis), dual(stored.state_of(axis))});
    return v;
  }();
};

}  // namespace detail

struct adamw_options {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;  ///< on parameters that decay
};

/// AdamW with decoupled weight decay (Loshchilov and Hutter 2019). Its state lies as the parameters are stored.
template <class T, compute_device Device = cpu>
class adamw {
 public:
  explicit adamw(adamw_options options = {}) : options_(options) {
    const auto unit = [](const char* name, double value) {
      if (!(value >= 0 && value < 1))
        fail(std::string("adamw: ") + name + " = " + std::to_string(value) + ", must be at least 0 and below 1");
    };
    unit("beta1", options.beta1);
    unit("beta2", options.beta2);
    if (!(options.epsilon > 0)) fail("adamw: epsilon = " + std::to_string(options.epsilon) + ", must be positive");
    if (!(options.weight_decay >= 0))
      fail("adamw: weight_decay = " + std::to_string(options.weight_decay) + ", must be at least 0");
  }

  /// Starts a step; every parameter is then updated once, in the same order in every step.
  void begin_step(double learning_rate, double gradient_scale = 1.0) {
    ++step_;
    next_ = 0;
    learning_rate_ = learning_rate;
    gradient_scale_ = gradient_scale;
  }
  void update(context<Device>& ctx, parameter_base<T, Device>& p) {
    update(ctx, p.value(), p.gradient(), p.size(), p.info().decays);
  }
  /// The same for a tensor of the caller's. A gradient that is still partial over some axis does not compile: that is a
  /// forgotten reduction.
  template <spec_like Stored, spec_like Gradient>
  void update(context<Device>& ctx, tensor<T, Stored, Device>& p, const tensor<T, Gradient, Device>& gradient,
              bool decays = true) {
    static_assert(enforced<detail::optimizer_value<Stored, Gradient>, among<Stored, Gradient>, Gradient, Stored>);
    update(ctx, p.data(), gradient.data(), p.size(), decays);
  }
  std::int64_t step() const { return step_; }

 private:
  void update(context<Device>& ctx, T* value, const T* gradient, std::int64_t n, bool decays) {
    if (next_ == moments_.size()) {
      moments_.push_back(make_buffer<T>(ctx.device, static_cast<std::size_t>(2 * n)));
      ctx.device.zero(moments_.back().data(), moments_.back().bytes(), ctx.device.main_stream());
    }
    T* const m = moments_[next_++].template data<T>();
    const kernels::adamw_settings settings{options_.beta1, options_.beta2, options_.epsilon};
    const auto scalars = kernels::adamw_scalars_of(settings, learning_rate_, step_, gradient_scale_);
    const kernels::adamw_tensor<T, T, T> one{value, gradient, m, m + n, nullptr, n, decays ? options_.weight_decay : 0};
    kernels::adamw_update(ctx.device, std::span(&one, 1), settings, &scalars);
  }

  adamw_options options_;
  std::vector<buffer<Device>> moments_;  ///< first, then second, of each parameter
  std::size_t next_ = 0;
  std::int64_t step_ = 0;
  double learning_rate_ = 0, gradient_scale_ = 1;
};

}  // namespace plait
