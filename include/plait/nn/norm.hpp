// RMSNorm and LayerNorm over the last dim, whole or sharded, as layers. Norms of each head's query and key are
// elsewhere: nn/attention.hpp.
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
#include "plait/nn/layer_checks.hpp"
#include "plait/nn/linear/core.hpp"
#include "plait/nn/open_sum.hpp"
#include "plait/nn/other_arrays.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/parameter/array.hpp"
#include "plait/nn/parameter/rebind.hpp"
#include "plait/nn/parameter/use.hpp"
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

// The part that both norms over the last dim share: sizes, parameters, sums over rows.

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

/// The shared part of both norms: sizes, the group that shares a row, and parameters of the last dim.
template <class Precision, compute_device Device>
class norm_core {
 public:
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using S = statistic_of<Precision>;
  using K = gradient_of<activation_of<Precision>>;  ///< in which kernels sum gradients
  static constexpr bool in_place = sums_in_place<activation_of<Precision>, G>;

  norm_core(const context<Device>& ctx, const layout& input, const layout& stored, const layout& placed,
            const std::string& name, bool with_bias, const parameter_memory<Precision>& callers)
      : columns_global(ctx.sizes.of(input.dims.back().dim)), names(name) {
    enforce(check_boundary(input, ctx.ranks.shape()), name + ": input");
    take_sizes(ctx, input, name);
    const axis_list sharing = ctx.ranks.pruned(input.dims.back().axes);
    if (!sharing.empty()) row_group = &ctx.ranks.group(sharing);
    callers.require_complete(name, true, with_bias);
    const auto make = [&](const char* which, double start, const auto& value, const auto& gradient,
                          const auto& master) {
      return std::make_shared<parameter<Precision, Device>>(
          ctx, parameter_info{name + which, {columns_global}, {start, 0}, false}, stored, placed, input,
          parameter_place<Precision, Device>(ctx.device, local_elements(placed, ctx.ranks.shape(), ctx.sizes),
                                             value.pointer(), gradient.pointer(), master.pointer()));
    };
    weight = make(".weight", 1, callers.weight, callers.gradient, callers.master);
    if (with_bias) bias = make(".bias", 0, callers.bias, callers.bias_gradient, callers.bias_master);
    if (!ctx.numerics.canonical()) return;
    if (row_group)
      fail({name, ": canonical numerics (deterministic) have no order for norms of rows that ranks share"});
    const token_leaves leaves(ctx.numerics, input, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank(), token_grain::fine,
                              name);
    for (auto* p : {&weight, &bias})
      if (*p) (*p)->add_terms(leaves);
    canonical = true;
  }

  /// Takes other sizes for a norm that is made; throws under canonical numerics, which are fixed by the sizes.
  void resize(const context<Device>& ctx, const layout& input) {
    require_resizable(names.layer(), canonical);
    arm_checks(ctx);
    take_sizes(ctx, input, names.layer());
  }
  /// Takes the sizes of the context; all but the last dim's may change.
  void take_sizes(const context<Device>& ctx, const layout& input, const std::string& name) {
    if (const std::int64_t now = ctx.sizes.of(input.dims.back().dim); now != columns_global)
      fail({name, ": resize changes ", input.dims.back().dim.text(), " from ", columns_global, " to ", now,
            ", and the weight has this dim: make another norm for another width"});
    const box part = local_box(input, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    enforce_divides(input, ctx.ranks.shape(), ctx.sizes, name);
    columns = part.local[static_cast<std::size_t>(part.dims - 1)];
    rows = part.local_size() / columns;
    sizes.take(name, ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes, {&input});
  }
  /// Throws unless the sizes of a call's context are those that the norm was made for.
  void require_sizes(const context<Device>& ctx) const {
    sizes.require(weight->name(), ctx.ranks.shape(), ctx.ranks.rank(), ctx.sizes);
  }
  void rebind(const parameter_memory<Precision>& callers) {
    rebind_parameters<Precision, Device>(names.layer(), {weight}, {bias}, callers);
  }

  /// Sums per-row values over the ranks that share the rows.
  void sum_rows(S* values, std::int64_t count) {
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
    require_size(names.checked(*weight).name(), "x", x, rows * columns);
    require_size(weight->name(), "y", y, rows * columns);
  }
  void require_backward_sizes(std::int64_t x, std::int64_t dy, std::int64_t dx) const {
    require_size(names.checked(*weight).name(), "x", x, rows * columns);
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

  /// Adds to the canonical sums over tokens of a parameter: add(row of x, ..., G* out) of some rows adds to out.
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

  std::int64_t rows = 0, columns = 0, columns_global = 0;
  made_for sizes;
  any_communicator* row_group = nullptr;
  layer_names names;
  parameter_ptr<Precision, Device> weight, bias;
  bool canonical = false;

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

}  // namespace detail

PLAIT_COMPILED_TEMPLATE(class detail::norm_core<float, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::norm_core<bf16, cpu>)
PLAIT_COMPILED_TEMPLATE(class detail::norm_core<double, cpu>)

/// RMSNorm (Zhang and Sennrich 2019) over the last dim of `Input`: y = x w / sqrt(mean(x^2) + eps), with the input's
/// spec. Under sequence parallelism its weight's gradient is partial over the axes of the sequence too; the type says
/// so, so the reduction cannot be forgotten. If the last dim is sharded, the statistics are reduced inside, both ways.
template <class Precision, spec_like Input, compute_device Device = cpu>
class rms_norm
    : public layer_types<activation_of<Precision>, Input, Input, Device>,
      public other_arrays<rms_norm<Precision, Input, Device>, activation_of<Precision>, Input, Input, Device> {
  using value = detail::norm_value<Input>;
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  using input = Input;
  using output = Input;
  static constexpr bool cheap = true;
  struct saved {
    buffer<Device> inv_rms;  ///< [rows]
    detail::saved_stamp stamp{};
  };
  static_assert(enforced<value, among<Input>, Input>);
  using other_arrays<rms_norm, T, Input, Input, Device>::forward;
  using other_arrays<rms_norm, T, Input, Input, Device>::backward;

  /// `stored` is how the weight lies between steps; by default, as the last dim.
  explicit rms_norm(const context<Device>& ctx, double eps = 1e-5, const std::string& name = "norm",
                    const layout& stored = value::derivation.stored, const parameter_memory<Precision>& callers = {})
      : core_(ctx, layout_v<Input>, stored, value::derivation.stored, name, false, callers), eps_(eps) {}
  /// On the caller's weight and gradient: this rank's part of the last dim.
  rms_norm(const context<Device>& ctx, double eps, const std::string& name, weight_of<Precision>* weight,
           gradient_of<Precision>* gradient)
      : rms_norm(ctx, eps, name, value::derivation.stored, {weight, gradient}) {}
  /// On the caller's memory, as `parameter_memory` says.
  rms_norm(const context<Device>& ctx, double eps, const std::string& name, const parameter_memory<Precision>& callers)
      : rms_norm(ctx, eps, name, value::derivation.stored, callers) {}

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
    forward(mb, x.data(), y.data(), keep);
  }
  /// Forward of a sum, which is computed in the same pass.
  tensor<T, output, Device> forward(const microbatch<Device>& mb, open_sum<T, input, Device>& x,
                                    saved* keep = nullptr) {
    tensor<T, output, Device> y(mb.ctx);
    forward(mb, x.data(), y.data(), keep, x.addend(), x.data());
    x.closed();
    return y;
  }
  /// Forward on the caller's memory. Where `addend` is not null, the input is x + addend; it goes to `sum`, which may
  /// be x.
  void forward(const microbatch<Device>& mb, const T* x, T* y, saved* keep = nullptr, const T* addend = nullptr,
               T* sum = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, core_.names.forward());
    core_.require_sizes(ctx);
    core_.require_arrays(x, "y", y);
    if (addend) core_.require_arrays(addend, "sum", sum);
    auto inv = make_buffer<S>(ctx.device, static_cast<std::size_t>(core_.rows));
    S* const r = inv.template data<S>();
    if (!core_.row_group) {
      kernels::rms_norm_forward(ctx.device, x, core_.weight->used_value(), y, r, core_.rows, core_.columns, eps_,
                                addend, sum);
    } else {
      x = core_.added(ctx.device, x, addend, sum);
      kernels::row_sum_squares(ctx.device, x, r, core_.rows, core_.columns);
      core_.sum_rows(r, core_.rows);
      kernels::rms_apply(ctx.device, x, r, core_.weight->used_value(), y, core_.rows, core_.columns,
                         core_.columns_global, eps_);
      kernels::rms_inverse(ctx.device, r, r, core_.rows, core_.columns_global, eps_);
    }
    if (keep) {
      keep->inv_rms = std::move(inv);
      keep->stamp.make(core_.weight.get(), mb.index, addend ? sum : x);
    }
    detail::note_forward(mb, *this, layout_v<input>, core_.weight->name(), x, core_.rows * core_.columns);
  }

  /// `addend`, such as the gradient of a residual connection, is added in the same pass where it is not null.
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
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<Input>, Gradient, output>);
    core_.require_backward_sizes(x.size(), dy.size(), dx.size());
    backward(mb, x.data(), kept, dy.data(), dx.data(), detail::addend_array(core_.weight->name(), addend, x.size()));
  }
  /// Backward on the caller's memory; dx must be neither x nor dy nor addend. Null: only the weights' gradients are
  /// computed.
  void backward(const microbatch<Device>& mb, const T* x, saved& kept, const T* dy, T* dx, const T* addend = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, core_.names.backward());
    core_.require_sizes(ctx);
    core_.check_backward(kept.inv_rms, x, dy, dx, addend);
    kept.stamp.use(core_.weight->name(), core_.weight.get(), mb.index, x);
    detail::note_backward(mb, detail::dual_v<output>, core_.weight->name(), dy, core_.rows * core_.columns);
    const S* const inv = kept.inv_rms.template data<S>();
    if (!core_.row_group) {  // in one pass over x and dy, unless the weight's part of it is deferred
      const bool now = !mb.deferred && !core_.canonical && core_.in_place;
      kernels::rms_norm_backward(ctx.device, x, core_.weight->used_value(), dy, inv, dx,
                                 core_.weight_sum(ctx.device, now), core_.rows, core_.columns, addend);
      if (now) return;
    } else if (dx) {
      auto dot = make_buffer<S>(ctx.device, static_cast<std::size_t>(core_.rows));
      kernels::rms_norm_backward_dot(ctx.device, x, core_.weight->used_value(), dy, dot.template data<S>(), core_.rows,
                                     core_.columns);
      core_.sum_rows(dot.template data<S>(), core_.rows);
      kernels::rms_norm_backward_dx(ctx.device, x, core_.weight->used_value(), dy, inv, dot.template data<S>(), dx,
                                    core_.rows, core_.columns, core_.columns_global, addend);
    }
    if (!core_.weight->trainable()) return;
    detail::with_gradient_kept(
        mb, dy, core_.rows * core_.columns, [this, &ctx, x, inv, i = mb.index, n = mb.count](const T* d) {
          const range weights_shown(ctx.device, core_.names.weights());
          if (core_.canonical)
            return core_.add_terms(
                ctx.device, *core_.weight, i, n, x, d, inv, nullptr,
                [&](const T* rows_x, const T* rows_d, const S* rows_inv, const S*, auto* out, std::int64_t rows) {
                  kernels::rms_norm_backward_dweight(ctx.device, rows_x, rows_d, rows_inv, out, rows, core_.columns);
                });
          detail::with_kernel_sum<T>(ctx.device, core_.weight_gradient(ctx.device), core_.columns, [&](auto* sums) {
            kernels::rms_norm_backward_dweight(ctx.device, x, d, inv, sums, core_.rows, core_.columns);
          });
        });
  }

  /// Makes the norm ready for other batches and lengths, those of this context (`linear::resize`).
  void resize(const context<Device>& ctx) { core_.resize(ctx, layout_v<Input>); }
  /// Binds the weight to other memory of the caller's (`linear::rebind`).
  void rebind(const parameter_memory<Precision>& memory) { core_.rebind(memory); }

  const parameter_ptr<Precision, Device>& weight() const { return core_.names.checked(core_.weight); }
  template <class F>
  void visit(F&& f) {
    f(*core_.names.checked(core_.weight));
  }

 private:
  detail::norm_core<Precision, Device> core_;
  double eps_;
};

/// LayerNorm (Ba et al. 2016) over the last dim of `Input`: y = (x - mean) / sqrt(var + eps) w + b, with the input's
/// spec. If the last dim is sharded, the sum and then the centred squares are reduced inside.
template <class Precision, spec_like Input, compute_device Device = cpu>
class layer_norm
    : public layer_types<activation_of<Precision>, Input, Input, Device>,
      public other_arrays<layer_norm<Precision, Input, Device>, activation_of<Precision>, Input, Input, Device> {
  using value = detail::norm_value<Input>;
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  using input = Input;
  using output = Input;
  static constexpr bool cheap = true;
  struct saved {
    buffer<Device> statistics;  ///< mean [rows], then 1 / deviation [rows]
    detail::saved_stamp stamp{};
  };
  static_assert(enforced<value, among<Input>, Input>);
  using other_arrays<layer_norm, T, Input, Input, Device>::forward;
  using other_arrays<layer_norm, T, Input, Input, Device>::backward;

  /// `stored` as for `rms_norm`.
  explicit layer_norm(const context<Device>& ctx, double eps = 1e-5, const std::string& name = "norm",
                      const layout& stored = value::derivation.stored, const parameter_memory<Precision>& callers = {})
      : core_(ctx, layout_v<Input>, stored, value::derivation.stored, name, true, callers), eps_(eps) {}
  /// On the caller's parameters.
  layer_norm(const context<Device>& ctx, double eps, const std::string& name,
             const parameter_memory<Precision>& callers)
      : layer_norm(ctx, eps, name, value::derivation.stored, callers) {}

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
    forward(mb, x.data(), y.data(), keep);
  }
  /// Forward of a sum, which is computed in the same pass.
  tensor<T, output, Device> forward(const microbatch<Device>& mb, open_sum<T, input, Device>& x,
                                    saved* keep = nullptr) {
    tensor<T, output, Device> y(mb.ctx);
    forward(mb, x.data(), y.data(), keep, x.addend(), x.data());
    x.closed();
    return y;
  }
  /// Forward on the caller's memory. Where `addend` is not null, the input is x + addend; it goes to `sum`, which may
  /// be x.
  void forward(const microbatch<Device>& mb, const T* x, T* y, saved* keep = nullptr, const T* addend = nullptr,
               T* sum = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, core_.names.forward());
    core_.require_sizes(ctx);
    core_.require_arrays(x, "y", y);
    if (addend) core_.require_arrays(addend, "sum", sum);
    auto statistics = make_buffer<S>(ctx.device, static_cast<std::size_t>(2 * core_.rows));
    S* const mean = statistics.template data<S>();
    S* const inv = mean + core_.rows;
    const auto *w = core_.weight->used_value(), *b = core_.bias->used_value();
    if (!core_.row_group) {
      kernels::layer_norm_forward(ctx.device, x, w, b, y, mean, inv, core_.rows, core_.columns, eps_, addend, sum);
    } else {
      x = core_.added(ctx.device, x, addend, sum);
      kernels::row_sums(ctx.device, x, mean, core_.rows, core_.columns);
      core_.sum_rows(mean, core_.rows);
      kernels::row_centred_squares(ctx.device, x, mean, inv, core_.rows, core_.columns, core_.columns_global);
      core_.sum_rows(inv, core_.rows);
      kernels::layer_norm_statistics(ctx.device, mean, inv, mean, inv, core_.rows, core_.columns_global, eps_);
      kernels::layer_norm_apply(ctx.device, x, mean, inv, w, b, y, core_.rows, core_.columns);
    }
    if (keep) {
      keep->statistics = std::move(statistics);
      keep->stamp.make(core_.weight.get(), mb.index, addend ? sum : x);
    }
    detail::note_forward(mb, *this, layout_v<input>, core_.weight->name(), x, core_.rows * core_.columns);
  }

  /// `addend`, such as the gradient of a residual connection, is added in the same pass where it is not null.
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
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<Input>, Gradient, output>);
    core_.require_backward_sizes(x.size(), dy.size(), dx.size());
    backward(mb, x.data(), kept, dy.data(), dx.data(), detail::addend_array(core_.weight->name(), addend, x.size()));
  }
  /// Backward on the caller's memory; dx must be neither x nor dy nor addend. Null: only the weights' gradients are
  /// computed.
  void backward(const microbatch<Device>& mb, const T* x, saved& kept, const T* dy, T* dx, const T* addend = nullptr) {
    const context<Device>& ctx = mb.ctx;
    const range profiled(ctx.device, core_.names.backward());
    core_.require_sizes(ctx);
    core_.check_backward(kept.statistics, x, dy, dx, addend);
    kept.stamp.use(core_.weight->name(), core_.weight.get(), mb.index, x);
    detail::note_backward(mb, detail::dual_v<output>, core_.weight->name(), dy, core_.rows * core_.columns);
    const S* const mean = kept.statistics.template data<S>();
    const S* const inv = mean + core_.rows;
    if (!core_.row_group) {
      const bool now =
          !mb.deferred && core_.weight->trainable() && !core_.canonical && core_.in_place;  // in the same pass
      kernels::layer_norm_backward(ctx.device, x, core_.weight->used_value(), dy, mean, inv, dx,
                                   core_.weight_sum(ctx.device, now), core_.bias_sum(ctx.device, now), core_.rows,
                                   core_.columns, addend);
      if (now) return;
    } else if (dx) {
      auto dots = make_buffer<S>(ctx.device, static_cast<std::size_t>(2 * core_.rows));
      kernels::layer_norm_backward_dots(ctx.device, x, core_.weight->used_value(), dy, mean, inv,
                                        dots.template data<S>(), core_.rows, core_.columns);
      core_.sum_rows(dots.template data<S>(), 2 * core_.rows);
      kernels::layer_norm_backward_dx(ctx.device, x, core_.weight->used_value(), dy, mean, inv, dots.template data<S>(),
                                      dx, core_.rows, core_.columns, core_.columns_global, addend);
    }
    const bool weight = core_.weight->trainable(), bias = core_.bias->trainable();
    if (!weight && !bias) return;
    detail::with_gradient_kept(
        mb, dy, core_.rows * core_.columns, [this, &ctx, x, mean, inv, weight, i = mb.index, n = mb.count](const T* d) {
          const range weights_shown(ctx.device, core_.names.weights());
          if (core_.canonical) return canonical_gradients(ctx.device, i, n, x, d, mean, inv);
          const auto to_bias = [&](auto&& add) {
            detail::with_kernel_sum<T>(ctx.device, core_.bias_gradient(ctx.device), core_.columns, add);
          };
          if (!weight)
            return to_bias([&](auto* sums) { kernels::bias_gradient(ctx.device, d, sums, core_.rows, core_.columns); });
          detail::with_kernel_sum<T>(ctx.device, core_.weight_gradient(ctx.device), core_.columns, [&](auto* sums) {
            to_bias([&](auto* bias_sums) {
              kernels::layer_norm_backward_dweight(ctx.device, x, d, mean, inv, sums, bias_sums, core_.rows,
                                                   core_.columns);
            });
          });
        });
  }

  /// As `rms_norm`'s.
  void resize(const context<Device>& ctx) { core_.resize(ctx, layout_v<Input>); }
  void rebind(const parameter_memory<Precision>& memory) { core_.rebind(memory); }

  template <class F>
  void visit(F&& f) {
    f(*core_.names.checked(core_.weight));
    f(*core_.bias);
  }

 private:
  void canonical_gradients(Device& on, std::int64_t index, std::int64_t count, const T* x, const T* dy, const S* mean,
                           const S* inv) {
    const auto n = core_.columns;
    core_.add_terms(
        on, *core_.weight, index, count, x, dy, inv, mean,
        [&](const T* rows_x, const T* d, const S* rows_inv, const S* rows_mean, auto* out, std::int64_t rows) {
          using G = gradient_of<T>;
          auto unused = make_buffer<G>(on, static_cast<std::size_t>(n));
          on.zero(unused.data(), unused.bytes(), on.main_stream());
          kernels::layer_norm_backward_dweight(on, rows_x, d, rows_mean, rows_inv, out, unused.template data<G>(), rows,
                                               n);
        });
    core_.add_terms(on, *core_.bias, index, count, x, dy, inv, nullptr,
                    [&](const T*, const T* d, const S*, const S*, auto* out, std::int64_t rows) {
                      kernels::bias_gradient(on, d, out, rows, n);
                    });
  }

  detail::norm_core<Precision, Device> core_;
  double eps_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
