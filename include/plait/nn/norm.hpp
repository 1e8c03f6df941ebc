// RMSNorm and LayerNorm over the last dim, whole or sharded: one layer of two kinds.
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

// The derivation of norms: how a norm's weight lies and is used, from the layout of its input.

/// Norms work over the last dim, which may be sharded; weights lie like it and are used replicated where rows vary.
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

/// Runs `work(dy)` as a weight gradient; if it is deferred, on a copy of dy that the task owns.
template <class T, compute_device Device, class F>
void with_gradient_kept(const microbatch<Device>& mb, const T* dy, std::int64_t count, F work) {
  if (!mb.deferred) return work(dy);
  Device& device = mb.ctx.device;
  auto copy = make_buffer<T>(device, static_cast<std::size_t>(count));
  device.copy(copy.data(), dy, copy.bytes(), device.main_stream());
  mb.on_weights([copy = std::move(copy), work]() mutable { work(copy.template data<T>()); });
}

/// The sizes of a norm, the group that shares a row, and the parameters of the last dim.
template <class Precision, compute_device Device>
class norm_core {
 public:
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using S = statistic_of<Precision>;
  using K = gradient_of<activation_of<Precision>>;  ///< in which kernels sum gradients
  static constexpr bool in_place = sums_in_place<activation_of<Precision>, G>;

  norm_core(const context<Device>& ctx, const layout& input, const layout& stored, const layout& placed,
            const std::string& name, bool with_bias, const parameter_memory<Precision>& callers);

  /// Takes other sizes for a norm that is made; throws where it `adds_terms`, whose order is fixed by the sizes.
  void resize(const context<Device>& ctx, const layout& input);
  /// Takes the sizes of the context; all but the last dim's may change.
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
  void require_sizes(const context<Device>& ctx) const;
  void rebind(const parameter_memory<Precision>& callers);

  /// Sums per-row values over the ranks that share the rows.
  void sum_rows(S* values, std::int64_t count) const {
    if (row_group) row_group->all_reduce(values, values, static_cast<std::size_t>(count), dtype_of<S>, reduce_op::sum);
  }

  /// The input: x, or x + addend where there is one.
  template <class T>
  const T* added(Device& device, const T* x, const T* addend, T* sum) const {
    if (addend == nullptr) return x;
    kernels::add(device, x, addend, sum, rows * columns);
    return sum;
  }

  void require_forward_sizes(std::int64_t x, std::int64_t y) const {
    require_size(names.checked(weight)->name(), "x", x, rows * columns);
    require_size(weight->name(), "y", y, rows * columns);
  }
  void require_backward_sizes(std::int64_t x, std::int64_t dy, std::int64_t dx) const {
    require_size(names.checked(weight)->name(), "x", x, rows * columns);
    require_size(weight->name(), "dy", dy, rows * columns);
    require_size(weight->name(), "dx", dx, rows * columns);
  }
  /// Throws where the caller's x or the other array is null.
  void require_arrays(const void* x, const char* name, const void* other) const {
    require_array(weight->name(), "x", x, rows * columns);
    require_array(weight->name(), name, other, rows * columns);
  }
  /// Throws where a backward pass would read what no forward pass has kept, or what it has overwritten.
  template <class T>
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

  /// Adds to the `gradient_terms` of a parameter: add(row of x, ..., G* out) of some rows adds to out.
  template <class T, class Add>
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
  bool adds_terms = false;  ///< whether `gradient_terms` sum the gradients of parameters
  /// Whether the kernel that makes dx may add the gradients of parameters as well.
  bool one_pass = false;

  /// Where kernels add gradients in a pass that makes dx as well; null for a frozen parameter, or if they are deferred,
  /// or narrower than what kernels sum in.
  K* weight_sum(Device& device, bool now) const { return sum_of(device, *weight, now); }
  K* bias_sum(Device& device, bool now) const { return sum_of(device, *bias, now); }
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
void norm_core<Precision, Device>::resize(const context<Device>& ctx, const layout& input) {
  require_resizable(names.layer(), adds_terms);
  arm_checks(ctx);
  take_sizes(ctx, input, names.layer());
}

template <class Precision, compute_device Device>
void norm_core<Precision, Device>::rebind(const parameter_memory<Precision>& callers) {
  rebind_parameters<Precision, Device>(names.layer(), {weight}, {bias}, callers);
}

template <class Precision, compute_device Device>
void norm_core<Precision, Device>::require_sizes(const context<Device>& ctx) const {
  sizes.require(weight->name(), ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
}

PLAIT_COMPILED_TEMPLATE(class norm_core<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class norm_core<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class norm_core<double, cpu>)

// The kinds of norms: the kernels of rows that a rank has whole, of rows that ranks share, and of weight gradients.
// `s` are the statistics of rows: `row_statistics` arrays [rows].

/// y = x w / sqrt(mean(x^2) + eps); the statistic of a row is the inverse of the root.
struct root_mean_square {
  static constexpr bool with_bias = false;
  static constexpr std::int64_t row_statistics = 1;

  template <class Core, class Device, class T, class S>
  static void forward(const Core& n, Device& device, const T* x, T* y, S* s, double eps, const T* addend, T* sum) {
    kernels::rms_norm_forward(device, x, n.weight->used_value(), y, s, n.rows, n.columns, eps, addend, sum);
  }
  template <class Core, class Device, class T, class S>
  static void forward_shared(const Core& n, Device& device, const T* x, T* y, S* s, double eps) {
    kernels::row_sum_squares(device, x, s, n.rows, n.columns);
    n.sum_rows(s, n.rows);
    kernels::rms_apply(device, x, s, n.weight->used_value(), y, n.rows, n.columns, n.columns_global, eps);
    kernels::rms_inverse(device, s, s, n.rows, n.columns_global, eps);
  }
  template <class Core, class Device, class T, class S>
  static void backward(const Core& n, Device& device, const T* x, const T* dy, const S* s, T* dx, bool weights,
                       const T* addend) {
    kernels::rms_norm_backward(device, x, n.weight->used_value(), dy, s, dx, n.weight_sum(device, weights), n.rows,
                               n.columns, addend);
  }
  template <class Core, class Device, class T, class S>
  static void backward_shared(const Core& n, Device& device, const T* x, const T* dy, const S* s, T* dx,
                              const T* addend) {
    auto dot = make_buffer<S>(device, static_cast<std::size_t>(n.rows));
    S* const d = dot.template data<S>();
    kernels::rms_norm_backward_dot(device, x, n.weight->used_value(), dy, d, n.rows, n.columns);
    n.sum_rows(d, n.rows);
    kernels::rms_norm_backward_dx(device, x, n.weight->used_value(), dy, s, d, dx, n.rows, n.columns, n.columns_global,
                                  addend);
  }
  template <class Core, class Device, class T, class S>
  static void weight_gradients(const Core& n, Device& device, std::int64_t, std::int64_t, const T* x, const T* dy,
                               const S* s) {
    with_kernel_sum<T>(device, n.weight_gradient(device), n.columns, [&](auto* sums) {
      kernels::rms_norm_backward_dweight(device, x, dy, s, sums, n.rows, n.columns);
    });
  }
  template <class Core, class Device, class T, class S>
  static void sum_gradients(const Core& n, Device& device, std::int64_t index, std::int64_t count, const T* x,
                            const T* dy, const S* s) {
    n.add_terms(device, *n.weight, index, count, x, dy, s, static_cast<const S*>(nullptr),
                [&](const T* rows_x, const T* rows_dy, const S* inverse, const S*, auto* out, std::int64_t rows) {
                  kernels::rms_norm_backward_dweight(device, rows_x, rows_dy, inverse, out, rows, n.columns);
                });
  }
};

/// y = (x - mean) / sqrt(var + eps) w + b; the statistics are the means, then the inverses of the roots.
struct mean_and_variance {
  static constexpr bool with_bias = true;
  static constexpr std::int64_t row_statistics = 2;

  template <class Core, class Device, class T, class S>
  static void forward(const Core& n, Device& device, const T* x, T* y, S* s, double eps, const T* addend, T* sum) {
    kernels::layer_norm_forward(device, x, n.weight->used_value(), n.bias->used_value(), y, s, s + n.rows, n.rows,
                                n.columns, eps, addend, sum);
  }
  template <class Core, class Device, class T, class S>
  static void forward_shared(const Core& n, Device& device, const T* x, T* y, S* s, double eps) {
    S *const mean = s, *const inverse = s + n.rows;
    kernels::row_sums(device, x, mean, n.rows, n.columns);
    n.sum_rows(mean, n.rows);
    kernels::row_centred_squares(device, x, mean, inverse, n.rows, n.columns, n.columns_global);
    n.sum_rows(inverse, n.rows);
    kernels::layer_norm_statistics(device, mean, inverse, mean, inverse, n.rows, n.columns_global, eps);
    kernels::layer_norm_apply(device, x, mean, inverse, n.weight->used_value(), n.bias->used_value(), y, n.rows,
                              n.columns);
  }
  template <class Core, class Device, class T, class S>
  static void backward(const Core& n, Device& device, const T* x, const T* dy, const S* s, T* dx, bool weights,
                       const T* addend) {
    kernels::layer_norm_backward(device, x, n.weight->used_value(), dy, s, s + n.rows, dx,
                                 n.weight_sum(device, weights), n.bias_sum(device, weights), n.rows, n.columns, addend);
  }
  template <class Core, class Device, class T, class S>
  static void backward_shared(const Core& n, Device& device, const T* x, const T* dy, const S* s, T* dx,
                              const T* addend) {
    auto dots = make_buffer<S>(device, static_cast<std::size_t>(2 * n.rows));
    S* const d = dots.template data<S>();
    kernels::layer_norm_backward_dots(device, x, n.weight->used_value(), dy, s, s + n.rows, d, n.rows, n.columns);
    n.sum_rows(d, 2 * n.rows);
    kernels::layer_norm_backward_dx(device, x, n.weight->used_value(), dy, s, s + n.rows, d, dx, n.rows, n.columns,
                                    n.columns_global, addend);
  }
  template <class Core, class Device, class T, class S>
  static void weight_gradients(const Core& n, Device& device, std::int64_t, std::int64_t, const T* x, const T* dy,
                               const S* s) {
    const auto to_bias = [&](auto&& add) { with_kernel_sum<T>(device, n.bias_gradient(device), n.columns, add); };
    if (!n.weight->trainable())
      return to_bias([&](auto* sums) { kernels::bias_gradient(device, dy, sums, n.rows, n.columns); });
    with_kernel_sum<T>(device, n.weight_gradient(device), n.columns, [&](auto* sums) {
      to_bias([&](auto* bias_sums) {
        kernels::layer_norm_backward_dweight(device, x, dy, s, s + n.rows, sums, bias_sums, n.rows, n.columns);
      });
    });
  }
  template <class Core, class Device, class T, class S>
  static void sum_gradients(const Core& n, Device& device, std::int64_t index, std::int64_t count, const T* x,
                            const T* dy, const S* s) {
    n.add_terms(device, *n.weight, index, count, x, dy, s + n.rows, s,
                [&](const T* rows_x, const T* rows_dy, const S* inverse, const S* mean, auto* out, std::int64_t rows) {
                  using G = gradient_of<T>;
                  auto unused = make_buffer<G>(device, static_cast<std::size_t>(n.columns));
                  device.zero(unused.data(), unused.bytes(), device.main_stream());
                  kernels::layer_norm_backward_dweight(device, rows_x, rows_dy, mean, inverse, out,
                                                       unused.template data<G>(), rows, n.columns);
                });
    n.add_terms(device, *n.bias, index, count, x, dy, s + n.rows, static_cast<const S*>(nullptr),
                [&](const T*, const T* rows_dy, const S*, const S*, auto* out, std::int64_t rows) {
                  kernels::bias_gradient(device, rows_dy, out, rows, n.columns);
                });
  }
};

/// A norm over the last dim of `Input`, with the input's spec: what `Layer`, `rms_norm` or `layer_norm`, has of its
/// kind. Under sequence parallelism the gradients of its parameters are partial over the axes of the sequence too.
/// Their type records it, so the reduction cannot be forgotten. If the last dim is sharded, the statistics are reduced
/// inside, forward and backward.
template <class Layer, class Kind, class Precision, spec_like Input, compute_device Device>
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

  /// `stored` is how the parameters lie between steps; by default, as the last dim.
  explicit norm_layer(const context<Device>& ctx, double eps = 1e-5, const std::string& name = "norm",
                      const layout& stored = value::derivation.stored, const parameter_memory<Precision>& callers = {})
      : core_(ctx, layout_v<Input>, stored, value::derivation.stored, name, Kind::with_bias, callers),
        eps_(eps),
        gradients_(core_.adds_terms ? &Kind::template sum_gradients<core, Device, T, S>
                                    : &Kind::template weight_gradients<core, Device, T, S>) {}
  /// On the caller's memory, as in `parameter_memory`: this rank's part of the last dim.
  norm_layer(const context<Device>& ctx, double eps, const std::string& name,
             const parameter_memory<Precision>& callers)
      : norm_layer(ctx, eps, name, value::derivation.stored, callers) {}

  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                    saved* keep = nullptr) {
    tensor<T, output, Device> y(mb.ctx);
    forward(mb, x, y, keep);
    return y;
  }
  /// Forward into a tensor that is there, such as a view of the caller's memory.
  void forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, tensor<T, output, Device>& y,
               saved* keep = nullptr) {
    core_.require_forward_sizes(x.size(), y.size());
    run(mb, x.data(), y.data(), keep);
  }
  /// Forward of a sum, which is computed in the pass of the norm.
  tensor<T, output, Device> forward(const microbatch<Device>& mb, open_sum<T, input, Device>& x,
                                    saved* keep = nullptr) {
    tensor<T, output, Device> y(mb.ctx);
    run(mb, x.data(), y.data(), keep, x.addend(), x.data());
    x.closed();
    return y;
  }
  /// Forward on the caller's memory. Where `addend` has memory, the input is x + addend; it goes to `sum`, which may
  /// be x.
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

  /// `addend`, such as the gradient of a residual connection, is added in the pass of the norm where it is not null.
  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                            saved& kept, const tensor<T, Gradient, Device>& dy,
                                            const tensor<T, dual_t<input>, Device>* addend = nullptr) {
    tensor<T, dual_t<input>, Device> dx(mb.ctx);
    backward(mb, x, kept, dy, dx, addend);
    return dx;
  }
  /// This overload writes into a tensor that is there.
  template <spec_like Gradient>
  void backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, saved& kept,
                const tensor<T, Gradient, Device>& dy, tensor<T, dual_t<input>, Device>& dx,
                const tensor<T, dual_t<input>, Device>* addend = nullptr) {
    static_assert(enforced<dual_value_check<Gradient, output>, among<Input>, Gradient, output>);
    core_.require_backward_sizes(x.size(), dy.size(), dx.size());
    run_back(mb, x.data(), kept, dy.data(), dx.data(), addend_array(core_.weight->name(), addend, x.size()));
  }
  /// Backward on the caller's memory; dx must be neither x nor dy nor addend. Where it is `{}`, only the weights'
  /// gradients are computed.
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

  /// Makes the norm ready for the batches and lengths of this context (`linear::resize`).
  void resize(const context<Device>& ctx) { core_.resize(ctx, layout_v<Input>); }
  /// Binds the parameters to other memory of the caller's (`linear::rebind`).
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
    auto statistics = make_buffer<S>(ctx.device, static_cast<std::size_t>(Kind::row_statistics * core_.rows));
    S* const s = statistics.template data<S>();
    if (!core_.row_group) {
      Kind::forward(core_, ctx.device, x, y, s, eps_, addend, sum);
    } else {
      x = core_.added(ctx.device, x, addend, sum);
      Kind::forward_shared(core_, ctx.device, x, y, s, eps_);
    }
    if (keep) {
      keep->statistics = std::move(statistics);
      keep->stamp.make(core_.weight.get(), mb.index, addend ? sum : x);
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
    // In one pass over x and dy, unless the weights' part of it is deferred.
    const bool one_pass = core_.one_pass && !mb.deferred && core_.weight->trainable();
    if (!core_.row_group)
      Kind::backward(core_, ctx.device, x, dy, s, dx, one_pass, addend);
    else if (dx)
      Kind::backward_shared(core_, ctx.device, x, dy, s, dx, addend);
    if (one_pass || !core_.trainable()) return;
    with_gradient_kept(mb, dy, core_.rows * core_.columns, [this, &ctx, x, s, i = mb.index, n = mb.count](const T* d) {
      const range weights_shown(ctx.device, core_.names.weights());
      gradients_(core_, ctx.device, i, n, x, d, s);
    });
  }

  using core = norm_core<Precision, Device>;
  core core_;
  double eps_;
  /// The stage of the parameters' gradients.
  void (*gradients_)(const core&, Device&, std::int64_t index, std::int64_t count, const T* x, const T* dy,
                     const S* statistics);
};

}  // namespace detail

/// RMSNorm (Zhang and Sennrich 2019): y = x w / sqrt(mean(x^2) + eps).
template <class Precision, spec_like Input, compute_device Device = cpu>
class rms_norm : public detail::norm_layer<rms_norm<Precision, Input, Device>, detail::root_mean_square, Precision,
                                           Input, Device> {
  using base = detail::norm_layer<rms_norm, detail::root_mean_square, Precision, Input, Device>;

 public:
  using base::base;
  /// On the caller's weight and gradient: this rank's part of the last dim.
  rms_norm(const context<Device>& ctx, double eps, const std::string& name, weight_of<Precision>* weight,
           gradient_of<Precision>* gradient)
      : base(ctx, eps, name, parameter_memory<Precision>{weight, gradient}) {}
};

/// LayerNorm (Ba et al. 2016): y = (x - mean) / sqrt(var + eps) w + b.
template <class Precision, spec_like Input, compute_device Device = cpu>
class layer_norm : public detail::norm_layer<layer_norm<Precision, Input, Device>, detail::mean_and_variance, Precision,
                                             Input, Device> {
 public:
  using detail::norm_layer<layer_norm, detail::mean_and_variance, Precision, Input, Device>::norm_layer;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
