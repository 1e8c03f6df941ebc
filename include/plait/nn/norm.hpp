// RMSNorm and LayerNorm over the last dim, which may be sharded; both derive from one base.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/range.hpp"
#include "plait/layout/errors.hpp"
#include "plait/layout/spec.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/open_sum.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/array.hpp"
#include "plait/nn/parameter/info.hpp"
#include "plait/nn/parameter/memory.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait::detail {

// The derivation of norms: the layouts of a norm's weight in storage and in use, from the layout of its input.

/// The layouts of a norm over the last dim, which may be sharded. Weights are placed like that dim, and are used
/// replicated over axes on which rows vary.
struct norm_derivation {
  layout stored, used;
  plait::verdict verdict;
};
constexpr norm_derivation derive_norm(const layout& x) {
  norm_derivation d;
  d.stored.dims.push_back(x.dims.back());
  d.used = use_of(d.stored, x);
  d.verdict = normalize(x, d.used, x.dims.back().dim).verdict;
  return d;
}

template <class Input>
struct norm_value {
  static constexpr norm_derivation derivation = derive_norm(layout_v<Input>);
  static constexpr verdict value = derivation.verdict;
};

}  // namespace plait::detail

namespace plait {
namespace detail {

/// The sizes of a norm, the group of ranks that share rows, and the norm's parameters.
template <class Precision, compute_device Device>
class norm_core {
 public:
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using S = statistic_of<Precision>;
  using T = activation_of<Precision>;
  using K = gradient_of<T>;  ///< the type in which kernels sum gradients
  static constexpr bool in_place = sums_in_place<T, G>;

  norm_core(const context<Device>& ctx, const layout& input, const layout& stored, const layout& placed,
            const std::string& name, bool with_bias, const parameter_memory<Precision>& callers);

  /// Changes the sizes of an existing norm. Throws if it `adds_terms`, since the sizes fix the order of those sums.
  void resize(const context<Device>& ctx, const layout& input) {
    require_resizable(names.layer(), adds_terms);
    arm_checks(ctx);
    take_sizes(ctx, input, names.layer());
  }
  /// Takes the sizes of the context. All except the last dim's may change.
  void take_sizes(const context<Device>& ctx, const layout& input, const std::string& name) {
    if (const std::int64_t now = ctx.sizes.of(input.dims.back().dim); now != columns_global)
      fail({name, ": resize changes ", input.dims.back().dim.text(), " from ", columns_global, " to ", now,
            ", and the weight has this dim: make another norm for another width"});
    const box part = local_box(input, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    enforce_parts(input, ctx.ranks.shape(), ctx.sizes, name);
    columns = part.local[static_cast<std::size_t>(part.dims - 1)];
    rows = part.local_size() / columns;
    sizes.take(name, ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&input});
  }
  /// Throws unless the norm was made for the sizes of a call's context.
  void require_sizes(const context<Device>& ctx) const {
    sizes.require(weight->name(), ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
  }
  void rebind(const parameter_memory<Precision>& callers) {
    rebind_parameters<Precision, Device>(names.layer(), {weight}, {bias}, callers);
  }

  /// Sums per-row values over the ranks that share the rows.
  void sum_rows(S* values, std::int64_t count) const {
    if (row_group) row_group->all_reduce(values, values, static_cast<std::size_t>(count), dtype_of<S>, reduce_op::sum);
  }

  /// The number of statistics that a forward pass computes: the inverse root of each row, then, for LayerNorm, its
  /// mean.
  std::int64_t statistics() const { return (bias ? 2 : 1) * rows; }
  template <class Statistic>
  Statistic* means(Statistic* s) const {
    return bias ? s + rows : nullptr;
  }
  const W* bias_value() const { return bias ? bias->used_value() : nullptr; }

  /// Computes y and the statistics of x. With an `addend`, the input is x + addend, which goes to `sum`. Returns the
  /// input.
  const T* forward(Device& device, const T* x, T* y, S* s, double eps, const T* addend, T* sum) const;
  /// Computes dx, unless it is null. With `weights`, the same pass adds the gradients of the parameters.
  void backward(Device& device, const T* x, const T* dy, const S* s, T* dx, bool weights, const T* addend) const;
  /// Adds the gradients of the parameters.
  void weight_gradients(Device& device, const T* x, const T* dy, const S* s) const;
  /// Adds the parameters' gradients to their `gradient_terms`, for microbatch `index` of `count`.
  void sum_gradients(Device& device, std::int64_t index, std::int64_t count, const T* x, const T* dy, const S* s) const;

  /// Throws unless an array of a call has as many elements as the norm's rows.
  void require_size_of(const char* array, std::int64_t size) const {
    require_size(names.checked(weight)->name(), array, size, rows * columns);
  }
  /// Throws if the caller's x or the other array is null.
  void require_arrays(const void* x, const char* name, const void* other) const {
    require_array(weight->name(), "x", x, rows * columns);
    require_array(weight->name(), name, other, rows * columns);
  }
  /// Throws if no forward pass has kept values for this backward pass, or if dx overlaps an array that it reads.
  void check_backward(const buffer<Device>& kept, const T* x, const T* dy, const T* dx, const T* addend) const {
    if (kept.empty() && rows != 0)
      fail({"the norm of ", weight->name(),
            ": backward without what forward keeps: give forward a `saved`, and backward "
            "the same one, once"});
    const std::int64_t size = rows * columns;
    require_arrays(x, "dy", dy);
    require_no_overlap(weight->name(), "backward", {dx, size, "dx"},
                       {{x, size, "x"}, {dy, size, "dy"}, {addend, size, "addend"}});
  }

  /// Adds to the `gradient_terms` of a parameter: add(rows of x, ..., G* out, count) adds the gradient of some rows to
  /// out.
  template <class Add>
  void add_terms(Device& device, parameter<Precision, Device>& p, std::int64_t index, std::int64_t count, const T* x,
                 const T* dy, const S* inverse, const S* mean, Add&& add) const {
    if (!p.trainable()) return;
    p.begin_terms();
    p.array()->terms()[0]->add(device, index, count, 0, [&](const token_leaves::leaf& leaf, G* out, bool) {
      buffer<Device> room[4];
      device.zero(out, static_cast<std::size_t>(columns) * sizeof(G), device.main_stream());
      with_kernel_sum<T>(device, out, columns, [&](K* sums) {
        add(rows_of_leaf(device, leaf, x, columns, room[0]), rows_of_leaf(device, leaf, dy, columns, room[1]),
            rows_of_leaf(device, leaf, inverse, 1, room[2]),
            mean ? rows_of_leaf(device, leaf, mean, 1, room[3]) : nullptr, sums, leaf.count());
      });
    });
  }

  bool trainable() const { return weight->trainable() || (bias && bias->trainable()); }

  std::int64_t rows = 0, columns = 0, columns_global = 0;
  made_for sizes;
  any_communicator* row_group = nullptr;
  layer_names names;
  parameter_ptr<Precision, Device> weight, bias;
  bool adds_terms = false;  ///< whether gradients of parameters are sums of `gradient_terms`
  /// Whether the kernel that computes dx can also add the gradients of parameters.
  bool one_pass = false;

  /// The memory to which kernels add a gradient in the pass that computes dx. Null if the parameter is frozen, if
  /// gradients are deferred, or if they are narrower than the kernels' sums.
  K* weight_sum(Device& device, bool now) const { return sum_of(device, *weight, now); }
  K* bias_sum(Device& device, bool now) const { return bias ? sum_of(device, *bias, now) : nullptr; }
  /// The gradient; null for a frozen parameter.
  G* weight_gradient(Device& device) const { return weight->trainable() ? weight->used_gradient(device) : nullptr; }
  G* bias_gradient(Device& device) const { return bias->trainable() ? bias->used_gradient(device) : nullptr; }

 private:
  static K* sum_of(Device& device, parameter<Precision, Device>& p, bool now) {
    if constexpr (in_place) {
      if (now && p.trainable()) return p.used_gradient(device);
    }
    return nullptr;
  }
};

template <class Precision, compute_device Device>
norm_core<Precision, Device>::norm_core(const context<Device>& ctx, const layout& input, const layout& stored,
                                        const layout& placed, const std::string& name, bool with_bias,
                                        const parameter_memory<Precision>& callers)
    : columns_global(ctx.sizes.of(input.dims.back().dim)), names(name) {
  enforce(check_boundary(input, ctx.ranks.shape()), name + ": input");
  take_sizes(ctx, input, name);
  const axis_list sharing = ctx.ranks.pruned(input.dims.back().axes);
  if (!sharing.empty()) row_group = &ctx.ranks.group(sharing);
  const auto make = [&](const char* which, double start, const auto& value, const auto& gradient, const auto& master,
                        const auto& reduced) {
    return std::make_shared<parameter<Precision, Device>>(
        ctx, parameter_info{name + which, {columns_global}, {start, 0}, false}, stored, placed, input,
        parameter_place<Precision, Device>(
            ctx.device, local_box(placed, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank()).local_size(), value.pointer(),
            gradient.pointer(), master.pointer(), reduced.pointer()));
  };
  weight = make(".weight", 1, callers.weight, callers.gradient, callers.master, callers.reduced);
  if (with_bias)
    bias = make(".bias", 0, callers.bias, callers.bias_gradient, callers.bias_master, callers.bias_reduced);
  require_memory<Precision, Device>(name, {weight}, {bias}, callers);
  if (row_group) require_any_order(ctx, name, "norms of rows that ranks share");
  for (auto* p : {&weight, &bias})
    if (*p) adds_terms = terms_of_layer(ctx, **p, without_dims(input, placed), token_grain::fine, name) != nullptr;
  one_pass = in_place && !row_group && !adds_terms;
}

template <class Precision, compute_device Device>
auto norm_core<Precision, Device>::forward(Device& device, const T* x, T* y, S* s, double eps, const T* addend,
                                           T* sum) const -> const T* {
  const T* const input = addend == nullptr ? x : sum;
  const W* const w = weight->used_value();
  S* const mean = means(s);
  if (!row_group) {
    kernels::norm_forward(device, x, w, bias_value(), y, mean, s, rows, columns, eps, addend, sum);
    return input;
  }
  if (addend != nullptr) kernels::add(device, x, addend, sum, rows * columns);
  if (mean != nullptr) {
    kernels::row_sums(device, input, mean, rows, columns);
    sum_rows(mean, rows);
  }
  kernels::row_squares(device, input, mean, s, rows, columns, columns_global);
  sum_rows(s, rows);
  kernels::norm_statistics(device, mean, s, mean, s, rows, columns_global, eps);
  kernels::norm_apply(device, input, mean, s, w, bias_value(), y, rows, columns);
  return input;
}

template <class Precision, compute_device Device>
void norm_core<Precision, Device>::backward(Device& device, const T* x, const T* dy, const S* s, T* dx, bool weights,
                                            const T* addend) const {
  const W* const w = weight->used_value();
  if (!row_group)
    return kernels::norm_backward(device, x, w, dy, means(s), s, dx, weight_sum(device, weights),
                                  bias_sum(device, weights), rows, columns, addend);
  if (dx == nullptr) return;
  auto dots = make_buffer<S>(device, static_cast<std::size_t>(statistics()));
  S* const d = dots.template data<S>();
  kernels::norm_backward_dots(device, x, w, dy, means(s), s, d, rows, columns);
  sum_rows(d, statistics());
  kernels::norm_backward_dx(device, x, w, dy, means(s), s, d, dx, rows, columns, columns_global, addend);
}

template <class Precision, compute_device Device>
void norm_core<Precision, Device>::weight_gradients(Device& device, const T* x, const T* dy, const S* s) const {
  const auto to_weight = [&](K* bias_sums) {
    with_kernel_sum<T>(device, weight_gradient(device), columns, [&](K* sums) {
      kernels::norm_backward_dweight(device, x, dy, means(s), s, sums, bias_sums, rows, columns);
    });
  };
  if (!bias) return to_weight(nullptr);
  with_kernel_sum<T>(device, bias_gradient(device), columns, [&](K* sums) {
    if (weight->trainable())
      to_weight(sums);
    else
      kernels::bias_gradient(device, dy, sums, rows, columns);
  });
}

template <class Precision, compute_device Device>
void norm_core<Precision, Device>::sum_gradients(Device& device, std::int64_t index, std::int64_t count, const T* x,
                                                 const T* dy, const S* s) const {
  const S* const none = nullptr;
  add_terms(device, *weight, index, count, x, dy, s, means(s),
            [&](const T* rows_x, const T* rows_dy, const S* inverse, const S* mean, K* out, std::int64_t n) {
              kernels::norm_backward_dweight(device, rows_x, rows_dy, mean, inverse, out, nullptr, n, columns);
            });
  if (!bias) return;
  add_terms(device, *bias, index, count, x, dy, s, none,
            [&](const T*, const T* rows_dy, const S*, const S*, K* out, std::int64_t n) {
              kernels::bias_gradient(device, rows_dy, out, n, columns);
            });
}

PLAIT_COMPILED_TEMPLATE(class norm_core<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class norm_core<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class norm_core<double, cpu>)

/// A norm over the last dim of `Input`, with the input's spec: the base of `Layer`, `rms_norm` or `layer_norm`. Under
/// sequence parallelism the gradients of its parameters are also partial over the axes of the sequence. Their types
/// show this, so the reduction cannot be forgotten. If the last dim is sharded, forward and backward reduce the
/// statistics.
template <class Layer, bool WithBias, class Precision, spec_like Input, compute_device Device>
class norm_layer : public layer_types<activation_of<Precision>, Input, Input, Device>,
                   public other_arrays<Layer, activation_of<Precision>, Input, Input, Device> {
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;
  using refusals = other_arrays<Layer, T, Input, Input, Device>;

 protected:
  using value = norm_value<Input>;

 public:
  using input = Input;
  using output = Input;
  static constexpr bool cheap = true;
  struct saved {
    buffer<Device> statistics;  ///< of rows
    saved_stamp stamp{};

    template <class F>
    void visit(F&& f) {
      f(statistics);
    }
  };
  static_assert(enforced<value, among<Input>, Input>);
  using refusals::backward;
  using refusals::forward;

  /// `stored` is the layout of the parameters between steps; by default that of the last dim.
  explicit norm_layer(const context<Device>& ctx, double eps = 1e-5, const std::string& name = "norm",
                      const layout& stored = value::derivation.stored, const parameter_memory<Precision>& callers = {})
      : core_(ctx, layout_v<Input>, stored, value::derivation.stored, name, WithBias, callers), eps_(eps) {}
  /// Uses the caller's memory, given as `parameter_memory`: this rank's part of the last dim.
  norm_layer(const context<Device>& ctx, double eps, const std::string& name,
             const parameter_memory<Precision>& callers)
      : norm_layer(ctx, eps, name, value::derivation.stored, callers) {}

  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                    saved* keep = nullptr) {
    tensor<T, output, Device> y(mb.ctx);
    forward(mb, x, y, keep);
    return y;
  }
  /// Forward into an existing tensor, such as a view of the caller's memory.
  void forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, tensor<T, output, Device>& y,
               saved* keep = nullptr) {
    core_.require_size_of("x", x.size());
    core_.require_size_of("y", y.size());
    run(mb, x.data(), y.data(), keep);
  }
  /// Forward of an open sum, which the norm computes in its own pass.
  tensor<T, output, Device> forward(const microbatch<Device>& mb, open_sum<T, input, Device>& x,
                                    saved* keep = nullptr) {
    tensor<T, output, Device> y(mb.ctx);
    run(mb, x.data(), y.data(), keep, x.addend(), x.data());
    x.closed();
    return y;
  }
  /// Forward on the caller's memory. If `addend` has memory, the input is x + addend, and it is written to `sum`, which
  /// may be x.
  void forward(const microbatch<Device>& mb, const part<const T, input>& x, const part<T, output>& y,
               saved* keep = nullptr, const part<const T, input>& addend = {}, const part<T, input>& sum = {}) {
    core_.require_sizes(mb.ctx);
    const std::int64_t size = core_.rows * core_.columns;
    require_part(weight()->name(), "x", x, size);
    require_part(weight()->name(), "y", y, size);
    require_part(weight()->name(), "addend", addend, size);
    require_part(weight()->name(), "sum", sum, size);
    run(mb, x.unchecked(), y.unchecked(), keep, addend.unchecked(), sum.unchecked());
  }

  /// Adds `addend`, such as the gradient of a residual connection, in the norm's own pass, unless it is null.
  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                            saved& kept, const tensor<T, Gradient, Device>& dy,
                                            const tensor<T, dual_t<input>, Device>* addend = nullptr) {
    tensor<T, dual_t<input>, Device> dx(mb.ctx);
    backward(mb, x, kept, dy, dx, addend);
    return dx;
  }
  /// This overload writes into an existing tensor.
  template <spec_like Gradient>
  void backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, saved& kept,
                const tensor<T, Gradient, Device>& dy, tensor<T, dual_t<input>, Device>& dx,
                const tensor<T, dual_t<input>, Device>* addend = nullptr) {
    static_assert(enforced<dual_value_check<Gradient, output>, among<Input>, Gradient, output>);
    core_.require_size_of("x", x.size());
    core_.require_size_of("dy", dy.size());
    core_.require_size_of("dx", dx.size());
    run_back(mb, x.data(), kept, dy.data(), dx.data(), addend_array(core_.weight->name(), addend, x.size()));
  }
  /// Backward on the caller's memory; dx must be none of x, dy and addend. If dx is `{}`, it computes only the
  /// gradients of the parameters.
  template <class Numbers, spec_like Gradient>
  void backward(const microbatch<Device>& mb, const part<const T, input>& x, saved& kept,
                const part<Numbers, Gradient>& dy, const part<T, dual_t<input>>& dx,
                const part<const T, dual_t<input>>& addend = {}) {
    static_assert(enforced<dual_value_check<Gradient, output>, among<Input>, Gradient, output>);
    const part<const T, Gradient> d = dy;
    core_.require_sizes(mb.ctx);
    const std::int64_t size = core_.rows * core_.columns;
    require_part(weight()->name(), "x", x, size);
    require_part(weight()->name(), "dy", d, size);
    require_part(weight()->name(), "dx", dx, size);
    require_part(weight()->name(), "addend", addend, size);
    run_back(mb, x.unchecked(), kept, d.unchecked(), dx.unchecked(), addend.unchecked());
  }

  /// Prepares the norm for the batches and lengths of this context (`linear::resize`).
  void resize(const context<Device>& ctx) { core_.resize(ctx, layout_v<Input>); }
  /// Binds the parameters to other memory that the caller owns (`linear::rebind`).
  void rebind(const parameter_memory<Precision>& memory) { core_.rebind(memory); }

  const parameter_ptr<Precision, Device>& weight() const { return core_.names.checked(core_.weight); }
  template <class F>
  void visit(F&& f) {
    f(*core_.names.checked(core_.weight));
    if (core_.bias) f(*core_.bias);
  }

 private:
  void run(const microbatch<Device>& mb, const T* x, T* y, saved* keep, const T* addend = nullptr, T* sum = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, core_.names.forward());
    core_.require_sizes(ctx);
    core_.require_arrays(x, "y", y);
    if (addend) core_.require_arrays(addend, "sum", sum);
    auto statistics = make_buffer<S>(ctx.device, static_cast<std::size_t>(core_.statistics()));
    S* const s = statistics.template data<S>();
    const T* const input_array = core_.forward(ctx.device, x, y, s, eps_, addend, sum);
    if (keep) {
      keep->statistics = std::move(statistics);
      keep->stamp.make(core_.weight.get(), mb.index, input_array);
    }
    note_forward(mb, static_cast<Layer&>(*this), layout_v<input>, core_.weight->name(), x, core_.rows * core_.columns);
  }

  void run_back(const microbatch<Device>& mb, const T* x, saved& kept, const T* dy, T* dx, const T* addend) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, core_.names.backward());
    core_.require_sizes(ctx);
    core_.check_backward(kept.statistics, x, dy, dx, addend);
    kept.stamp.use(core_.weight->name(), core_.weight.get(), mb.index, x);
    note_backward(mb, dual_v<output>, core_.weight->name(), dy, core_.rows * core_.columns);
    const S* const s = kept.statistics.template data<S>();
    // One pass over x and dy computes all gradients, unless those of the weights are deferred.
    const bool one_pass = core_.one_pass && !mb.deferred && core_.weight->trainable();
    core_.backward(ctx.device, x, dy, s, dx, one_pass, addend);
    if (one_pass || !core_.trainable()) return;
    with_gradient_kept(mb, dy, core_.rows * core_.columns, [this, &ctx, x, s, i = mb.index, n = mb.count](const T* d) {
      const range weights_shown(ctx.device, core_.names.weights());
      if (core_.adds_terms)
        core_.sum_gradients(ctx.device, i, n, x, d, s);
      else
        core_.weight_gradients(ctx.device, x, d, s);
    });
  }

  norm_core<Precision, Device> core_;
  double eps_;
};

}  // namespace detail

/// RMSNorm (Zhang and Sennrich 2019): y = x w / sqrt(mean(x^2) + eps).
template <class Precision, spec_like Input, compute_device Device = cpu>
class rms_norm : public detail::norm_layer<rms_norm<Precision, Input, Device>, false, Precision, Input, Device> {
  using base = detail::norm_layer<rms_norm, false, Precision, Input, Device>;

 public:
  using base::base;
  /// Uses the caller's weight and gradient: this rank's part of the last dim.
  rms_norm(const context<Device>& ctx, double eps, const std::string& name, weight_of<Precision>* weight,
           gradient_of<Precision>* gradient)
      : base(ctx, eps, name, parameter_memory<Precision>{weight, gradient}) {}
};

/// LayerNorm (Ba et al. 2016): y = (x - mean) / sqrt(var + eps) w + b.
template <class Precision, spec_like Input, compute_device Device = cpu>
class layer_norm : public detail::norm_layer<layer_norm<Precision, Input, Device>, true, Precision, Input, Device> {
 public:
  using detail::norm_layer<layer_norm, true, Precision, Input, Device>::norm_layer;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
