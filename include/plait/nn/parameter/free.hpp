// A parameter outside of layers: a program's own kernel reads it and adds to its gradient. Its gather and its
// gradient's reduction are derived from two specs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/memory.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {

namespace detail {
template <class Stored>
struct stored_spec {
  static constexpr verdict value = check_stored(layout_v<Stored>);
};
}  // namespace detail

/// A parameter for a program's own kernel, such as learned positions or the weight of its own norm. `Placed` is its
/// placement in use; `Met` is the spec of its partner in a product or a sum. The two determine the axes over which its
/// gradient is summed (`use_of`), so the program cannot forget one. In a checked step (`value_check`), ranks compare
/// its values, and the gradient terms that they added with the states that `Met` promises. If these differ, the next
/// `gather_parameters` or `zero_gradients` throws. `visit` passes it to optimizers, `reduce_all` and checkpoints.
///
/// `Stored` is its layout between steps. With a shard over `dp` this is ZeRO: `gather` gathers it, `reduce`
/// reduce-scatters its gradient, and an optimizer updates this rank's shard.
///
///     using rows = spec<shard<batch, dp>, hidden>;
///     free_parameter<float, spec<hidden, ffn>, rows, spec<shard<hidden, dp>, ffn>> w(ctx, "w", {...});
template <class Precision, spec_like Placed, spec_like Met, spec_like Stored = Placed, compute_device Device = cpu>
class free_parameter {
  static_assert(enforced<detail::stored_spec<Stored>, Stored>);

 public:
  /// `name` must be unique in a model, like the names of layers. `callers` may give weight, gradient and master.
  free_parameter(const context<Device>& ctx, const std::string& name, const parameter_memory<Precision>& callers = {},
                 initializer init = {})
      : names_(name) {
    const layout& placed = layout_v<Placed>;
    enforce_parts(placed, ctx.ranks.shape(), ctx.sizes, name);
    enforce_parts(layout_v<Stored>, ctx.ranks.shape(), ctx.sizes, name + ": as it is stored");
    enforce_parts(layout_v<Met>, ctx.ranks.shape(), ctx.sizes, name + ": its partner");
    std::vector<std::int64_t> shape;
    for (const dim_placement& p : placed.dims) shape.push_back(ctx.sizes.of(p.dim));
    parameter_ = std::make_shared<parameter<Precision, Device>>(
        ctx, parameter_info{name, std::move(shape), init, placed.dims.size() > 1, false, false}, layout_v<Stored>,
        placed, layout_v<Met>,
        parameter_place<Precision, Device>(
            ctx.device, local_box(placed, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank()).local_size(),
            callers.weight.pointer(), callers.gradient.pointer(), callers.master.pointer(), callers.reduced.pointer()));
    detail::require_memory<Precision, Device>(name, {parameter_}, {}, callers);
    parameter_->check_terms(describe(layout_v<Met>));
  }

  using met = Met;
  /// Its spec in the program's kernel: `Placed`, but replicated on axes where it is invariant and `Met` is not.
  using used = use_t<Placed, Met>;

  /// The values of this rank's part, for the program's kernel. Throws before `gather`.
  part<const weight_of<Precision>, used> values(const context<Device>& ctx) const {
    const part<const weight_of<Precision>, used> all(ctx, weight()->used_value());
    if (detail::notes_values(ctx) && ctx.ranks.checks().first_time(weight().get()))
      detail::note_value(ctx, weight()->used(), "the values of ", weight()->name(), all.unchecked(), all.size());
    return all;
  }
  /// Returns the memory to which the program's kernel adds the gradient of this rank's rows. Throws before
  /// `zero_gradient`.
  part<gradient_of<Precision>, dual_t<used>> gradients(const context<Device>& ctx) {
    return {ctx, weight()->used_gradient(ctx.device)};
  }
  /// Elements of this rank's part.
  std::int64_t size() const { return weight()->used_size(); }

  /// Binds it to other memory that the caller owns (`linear::rebind`).
  void rebind(const parameter_memory<Precision>& callers) {
    detail::rebind_parameters<Precision, Device>(names_.layer(), {parameter_}, {}, callers);
  }

  const parameter_ptr<Precision, Device>& weight() const { return names_.checked(parameter_); }
  template <class F>
  void visit(F&& f) {
    f(*weight());
  }

 private:
  detail::layer_names names_;
  parameter_ptr<Precision, Device> parameter_;
};

}  // namespace plait
