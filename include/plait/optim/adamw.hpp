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
    if (const verdict dims = compare_dims(operand::gradient, stored.dim_order(), gradient.dim_order()); !dims.ok())
      return dims;
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

/// AdamW with decoupled weight decay (Loshchilov and Hutter 2019). Its state lies as the parameters are stored, in the
/// precision's master type. What changes from step to step lies in the device's memory, so a step waits for nothing and
/// can be replayed as a graph.
template <class Precision, compute_device Device = cpu>
class adamw {
  using M = master_of<Precision>;
  using G = gradient_of<Precision>;
  using W = weight_of<Precision>;
  using tensor_to_update = kernels::adamw_tensor<M, G, W>;

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

  /// Starts a step; every parameter is then updated once, in the same order in every step. Gradients are multiplied
  /// with `gradient_scale`.
  void begin_step(context<Device>& ctx, double learning_rate, double gradient_scale = 1.0) {
    ++step_;
    next_ = 0;
    if (scalars_.empty()) scalars_ = make_buffer<kernels::adamw_scalars>(ctx.device, 1);
    const auto numbers = kernels::adamw_scalars_of(settings(), learning_rate, step_, gradient_scale);
    ctx.device.upload(scalars_.data(), &numbers, sizeof numbers, ctx.device.main_stream());
  }
  /// Replaces the step's gradient scale by one in the device's memory.
  void scale_gradients(context<Device>& ctx, const double* factor) {
    auto* const numbers = scalars_.template data<kernels::adamw_scalars>();
    ctx.device.copy(&numbers->gradient_scale, factor, sizeof(double), ctx.device.main_stream());
  }
  void update(context<Device>& ctx, parameter_base<Precision, Device>& p) {
    const tensor_to_update one = describe(ctx, p);
    run(ctx, std::span(&one, 1));
  }
  /// Updates all parameters of a model, together.
  template <class Model>
  void update_all(context<Device>& ctx, Model& model) {
    std::vector<tensor_to_update> all;
    next_ = 0;
    model.visit([&](parameter_base<Precision, Device>& p) { all.push_back(describe(ctx, p)); });
    run(ctx, all);
  }
  /// The same for a tensor of the caller's. A gradient that is still partial over some axis does not compile: that is a
  /// forgotten reduction.
  template <spec_like Stored, spec_like Gradient>
  void update(context<Device>& ctx, tensor<M, Stored, Device>& p, const tensor<G, Gradient, Device>& gradient,
              bool decays = true) {
    static_assert(enforced<detail::optimizer_value<Stored, Gradient>, among<Stored, Gradient>, Gradient, Stored>);
    const tensor_to_update one = describe(ctx, p.data(), gradient.data(), p.size(), decays, nullptr);
    run(ctx, std::span(&one, 1));
  }
  std::int64_t step() const { return step_; }

 private:
  kernels::adamw_settings settings() const { return {options_.beta1, options_.beta2, options_.epsilon}; }

  tensor_to_update describe(context<Device>& ctx, parameter_base<Precision, Device>& p) {
    M* const value = p.value();
    return describe(ctx, value, p.gradient(), p.size(), p.info().decays, p.rounded_copy());
  }
  tensor_to_update describe(context<Device>& ctx, M* value, const G* gradient, std::int64_t n, bool decays,
                            W* rounded) {
    if (next_ == moments_.size()) {
      moments_.push_back(make_buffer<M>(ctx.device, static_cast<std::size_t>(2 * n)));
      ctx.device.zero(moments_.back().data(), moments_.back().bytes(), ctx.device.main_stream());
    }
    M* const m = moments_[next_++].template data<M>();
    return {value, gradient, m, m + n, rounded, n, decays ? options_.weight_decay : 0};
  }
  void run(context<Device>& ctx, std::span<const tensor_to_update> tensors) {
    if (step_ == 0) fail("adamw: begin_step comes before the first update");
    kernels::adamw_update(ctx.device, tensors, settings(), scalars_.template data<kernels::adamw_scalars>());
  }

  adamw_options options_;
  std::vector<buffer<Device>> moments_;  ///< first, then second, of each parameter
  buffer<Device> scalars_;
  std::size_t next_ = 0;
  std::int64_t step_ = 0;
};

}  // namespace plait
