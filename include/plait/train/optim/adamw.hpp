// AdamW on reduced gradients of parameters, or on the caller's tensors. It sends nothing: a gradient that is partial
// does not compile. Next: nn/parameter.hpp for `reduce`, train/optim/gradient_norm.hpp for clipping.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/tensor/tensor.hpp"
#include "plait/train/optim/optimizer_state.hpp"

namespace plait {
namespace detail {

/// A gradient that may update a parameter stored as `Stored`: complete on every axis, and of the dual spec.
template <class Stored, class Gradient>
struct optimizer_value {
  static constexpr verdict value = [] {
    const layout stored = layout_v<Stored>, gradient = layout_v<Gradient>;
    verdict v;
    for (axis_id axis : gradient.partial)
      v.worsen({layout_error::unresolved_partial, axis, {}, state::partial, dual(stored.state_of(axis))});
    if (!v.ok()) return v;
    if (const verdict dims = compare_dims(operand::gradient, stored.dim_order(), gradient.dim_order()); !dims.ok())
      return dims;
    for (axis_id axis : differing_axes(gradient, dual(stored)))
      v.worsen({layout_error::wrong_dual, axis, gradient.sharded_by(axis), gradient.state_of(axis),
                dual(stored.state_of(axis))});
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
/// precision's master type, and belongs to a parameter by its name, so that any of them may be left out of any step.
/// Values that change from step to step lie in the device's memory, so a step waits for nothing and can be replayed as
/// a graph.
///
///     optimizer.begin_step(ctx, learning_rate);
///     layer.visit([&](auto& p) { optimizer.update(ctx, p.reduce(ctx)); });
template <class Precision, compute_device Device = cpu>
class adamw {
  using M = master_of<Precision>;
  using G = gradient_of<Precision>;
  using W = weight_of<Precision>;
  using tensor_to_update = kernels::adamw_tensor<M, G, W>;

 public:
  using reduced = reduced_gradient<Precision, Device>;

  explicit adamw(adamw_options options = {}) : options_(options) {
    const auto unit = [](const char* name, double value) {
      if (!(value >= 0 && value < 1)) fail({"adamw: ", name, " = ", value, ", must be at least 0 and below 1"});
    };
    unit("beta1", options.beta1);
    unit("beta2", options.beta2);
    if (!(options.epsilon > 0)) fail({"adamw: epsilon = ", options.epsilon, ", must be positive"});
    if (!(options.weight_decay >= 0)) fail({"adamw: weight_decay = ", options.weight_decay, ", must be at least 0"});
  }

  /// Starts a step, in which every parameter may be updated once. Gradients are multiplied with `gradient_scale`.
  void begin_step(const context<Device>& ctx, double learning_rate, double gradient_scale = 1.0) {
    ++step_;
    moments_.begin_step();
    if (scalars_.empty()) scalars_ = make_buffer<kernels::adamw_scalars>(ctx.device, 1);
    const auto numbers = kernels::adamw_scalars_of(settings(), learning_rate, step_, gradient_scale);
    ctx.device.upload(scalars_.data(), &numbers, sizeof numbers, ctx.device.main_stream());
  }
  /// Replaces the step's gradient scale by the factor of `clip` in the device's memory; where its `update` is 0, the
  /// step changes nothing.
  void clip_by(const context<Device>& ctx, const kernels::clip_numbers* clipped) {
    auto* const numbers = scalars_.template data<kernels::adamw_scalars>();
    const auto stream = ctx.device.main_stream();
    ctx.device.copy(&numbers->gradient_scale, &clipped->factor, sizeof(double), stream);
    ctx.device.copy(&numbers->update, &clipped->update, sizeof(double), stream);
  }
  /// The last step turned out to have been skipped: it does not count for the corrections of the moments' bias.
  void forget_step() { --step_; }

  void update(const context<Device>& ctx, reduced g) { update(ctx, std::span<reduced>(&g, 1)); }
  /// Updates several parameters together.
  void update(const context<Device>& ctx, std::span<reduced> gradients) {
    std::vector<tensor_to_update> all;
    all.reserve(gradients.size());
    for (reduced& g : gradients) {
      auto& p = g.parameter();
      const G* const values = g.data();
      const auto target = p.begin_update();
      all.push_back(describe(ctx, p.name(), target.master, values, g.size(), p.info().decays, target.rounded));
    }
    run(ctx, all);
  }
  /// A parameter itself is no gradient.
  template <class Parameter>
    requires requires(Parameter& p) { p.gather_plan(); }
  void update(const context<Device>&, Parameter&) {
    static_assert(always_false<Parameter>,
                  "an optimizer takes what `reduce` returns, so that no reduction is forgotten: write "
                  "optimizer.update(ctx, parameter.reduce(ctx))");
  }
  /// Updates a tensor of the caller's, whose state is known by `name`. A gradient that is still partial over some
  /// axis does not compile: that is a forgotten reduction.
  template <spec_like Stored, spec_like Gradient>
  void update(const context<Device>& ctx, const std::string& name, tensor<M, Stored, Device>& p,
              const tensor<G, Gradient, Device>& gradient, bool decays = true) {
    static_assert(enforced<detail::optimizer_value<Stored, Gradient>, among<Stored, Gradient>, Gradient, Stored>);
    const tensor_to_update one = describe(ctx, name, p.data(), gradient.data(), p.size(), decays, nullptr);
    run(ctx, std::span(&one, 1));
  }
  /// How many steps there were, without skipped ones.
  std::int64_t step() const { return step_; }
  /// Returns the numbers of the step, in the device's memory, for an optimizer that leaves parameters to this one.
  /// Valid from the first step on, as long as this object.
  const kernels::adamw_scalars* scalars() const { return scalars_.template data<kernels::adamw_scalars>(); }

 private:
  kernels::adamw_settings settings() const { return {options_.beta1, options_.beta2, options_.epsilon}; }

  tensor_to_update describe(const context<Device>& ctx, const std::string& name, M* value, const G* gradient,
                            std::int64_t n, bool decays, W* rounded) {
    M* const m = moments_.update(ctx, name, n);
    return {value, gradient, m, m + n, rounded, n, decays ? options_.weight_decay : 0};
  }
  void run(const context<Device>& ctx, std::span<const tensor_to_update> tensors) {
    if (tensors.empty()) return;  // there may be no numbers yet
    kernels::adamw_update(ctx.device, tensors, settings(), scalars_.template data<kernels::adamw_scalars>());
  }

  adamw_options options_;
  optimizer_state<M, Device> moments_{"adamw", 2};  ///< first moments, then second ones
  buffer<Device> scalars_;
  std::int64_t step_ = 0;  ///< for the corrections of bias
};

PLAIT_COMPILED_TEMPLATE(class adamw<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class adamw<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class adamw<double, cpu>)

}  // namespace plait
