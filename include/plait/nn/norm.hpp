#pragma once

#include <string>
#include <utility>

#include "plait/nn/linear.hpp"

namespace plait {
namespace detail {

/// Norms work over the last dim, which may be sharded; weights lie like it and are used replicated where rows vary.
struct norm_derivation {
  layout stored, used;
  plait::verdict verdict;
};
constexpr norm_derivation derive_norm(const layout& x) {
  norm_derivation d;
  d.stored.dims.push_back(x.dims.back());
  d.used = used_with(d.stored, x);
  d.verdict = normalize(x, d.used, x.dims.back().dim).verdict;
  return d;
}

template <class Input>
struct norm_value {
  static constexpr norm_derivation derivation = derive_norm(layout_v<Input>);
  static constexpr verdict value = derivation.verdict;
};

/// Runs `work(dy)` as a weight gradient; if it is put off, on a copy of dy that the task owns.
template <class T, compute_device Device, class F>
void with_gradient_kept(context<Device>& ctx, const T* dy, std::int64_t count, F work) {
  if (!ctx.deferred) return work(dy);
  auto copy = make_buffer<T>(ctx.device, static_cast<std::size_t>(count));
  ctx.device.copy(copy.data(), dy, copy.bytes(), ctx.device.main_stream());
  ctx.on_weights([copy = std::move(copy), work]() mutable { work(copy.template data<T>()); });
}

/// What both norms share: sizes, the group that shares a row, and parameters of the last dim.
template <class Precision, compute_device Device>
class norm_core {
 public:
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using S = statistic_of<Precision>;

  norm_core(context<Device>& ctx, const layout& input, const layout& stored, const layout& used,
            const std::string& name, bool with_bias)
      : columns_global(ctx.sizes.of(input.dims.back().dim)) {
    const box part = local_box(input, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    enforce_divides(input, ctx.ranks.shape(), ctx.sizes, name);
    columns = part.local[static_cast<std::size_t>(part.dims - 1)];
    rows = part.local_size() / columns;
    const axis_list sharing = ctx.ranks.pruned(input.dims.back().axes);
    row_axes = sharing;
    if (!sharing.empty()) row_group = &ctx.ranks.group(sharing);
    const auto n = static_cast<std::size_t>(columns);
    weight_memory_ = make_buffer<W>(ctx.device, n);
    gradient_memory_ = make_buffer<G>(ctx.device, n);
    weight = {ctx,
              {name + ".weight", {columns_global}, {1, 0}, false},
              stored,
              used,
              weight_memory_.template data<W>(),
              gradient_memory_.template data<G>()};
    if (!with_bias) return;
    bias_memory_ = make_buffer<W>(ctx.device, n);
    bias_gradient_memory_ = make_buffer<G>(ctx.device, n);
    bias = {ctx,
            {name + ".bias", {columns_global}, {0, 0}, false},
            stored,
            used,
            bias_memory_.template data<W>(),
            bias_gradient_memory_.template data<G>()};
  }

  /// Sums per-row values over the ranks that share the rows.
  void sum_rows(S* values, std::int64_t count) {
    if (row_group) row_group->all_reduce(values, values, static_cast<std::size_t>(count), dtype_of<S>, reduce_op::sum);
  }

  std::int64_t rows = 0, columns = 0, columns_global = 0;
  any_communicator* row_group = nullptr;
  axis_list row_axes;

  /// The reductions of per-row statistics, `per_row` values each.
  template <class F>
  void visit_row_sum(F&& f, const char* pass, std::int64_t per_row) const {
    if (!row_group) return;
    const auto bytes = static_cast<std::uint64_t>(per_row * rows) * sizeof(S);
    f(pass, collective_cost{collective::all_reduce, row_axes, bytes,
                            wire_bytes(collective::all_reduce, row_group->size(), bytes)});
  }

  parameter_base<Precision, Device> weight, bias;

 private:
  buffer<Device> weight_memory_, gradient_memory_, bias_memory_, bias_gradient_memory_;
};

}  // namespace detail

/// RMSNorm (Zhang and Sennrich 2019) over the last dim of `Input`: y = x w / sqrt(mean(x^2) + eps), with the input's
/// spec. Under sequence parallelism its weight's gradient is partial over the axes of the sequence too; the type says
/// so, so the reduction cannot be forgotten. If the last dim is sharded, the statistics are reduced inside, both ways.
template <class Precision, spec_like Input, compute_device Device = cpu>
class rms_norm {
  using value = detail::norm_value<Input>;
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  using value_type = T;
  using device = Device;
  using input = Input;
  using output = Input;
  struct saved {
    buffer<Device> inv_rms;  ///< [rows]
  };
  static_assert(enforced<value, among<Input>, Input>);

  /// `stored` is how the weight lies between steps; by default, as the last dim.
  explicit rms_norm(context<Device>& ctx, double eps = 1e-5, const std::string& name = "norm",
                    const layout& stored = value::derivation.stored)
      : core_(ctx, layout_v<Input>, stored, value::derivation.used, name, false), eps_(eps) {}

  tensor<T, output, Device> forward(context<Device>& ctx, const tensor<T, input, Device>& x, saved* keep = nullptr,
                                    recompute = recompute::none) {
    tensor<T, output, Device> y(ctx);
    forward(ctx, x.data(), y.data(), keep);
    return y;
  }
  void forward(context<Device>& ctx, const T* x, T* y, saved* keep) {
    auto inv = make_buffer<S>(ctx.device, static_cast<std::size_t>(core_.rows));
    S* const r = inv.template data<S>();
    if (!core_.row_group) {
      kernels::rms_norm_forward(ctx.device, x, core_.weight.used_value(), y, r, core_.rows, core_.columns, eps_);
    } else {
      kernels::row_sum_squares(ctx.device, x, r, core_.rows, core_.columns);
      core_.sum_rows(r, core_.rows);
      kernels::rms_apply(ctx.device, x, r, core_.weight.used_value(), y, core_.rows, core_.columns,
                         core_.columns_global, eps_);
      kernels::rms_inverse(ctx.device, r, r, core_.rows, core_.columns_global, eps_);
    }
    if (keep) keep->inv_rms = std::move(inv);
  }

  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(context<Device>& ctx, const tensor<T, input, Device>& x, saved& kept,
                                            const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<Input>, Gradient, output>);
    tensor<T, dual_t<input>, Device> dx(ctx);
    backward(ctx, x.data(), kept, dy.data(), dx.data());
    return dx;
  }
  void backward(context<Device>& ctx, const T* x, saved& kept, const T* dy, T* dx) {
    const S* const inv = kept.inv_rms.template data<S>();
    if (!core_.row_group) {
      kernels::rms_norm_backward(ctx.device, x, core_.weight.used_value(), dy, inv, dx,
                                 static_cast<gradient_of<Precision>*>(nullptr), core_.rows, core_.columns);
    } else {
      auto dot = make_buffer<S>(ctx.device, static_cast<std::size_t>(core_.rows));
      kernels::rms_norm_backward_dot(ctx.device, x, core_.weight.used_value(), dy, dot.template data<S>(), core_.rows,
                                     core_.columns);
      core_.sum_rows(dot.template data<S>(), core_.rows);
      kernels::rms_norm_backward_dx(ctx.device, x, core_.weight.used_value(), dy, inv, dot.template data<S>(), dx,
                                    core_.rows, core_.columns, core_.columns_global);
    }
    detail::with_gradient_kept(ctx, dy, core_.rows * core_.columns, [this, &ctx, x, inv](const T* d) {
      kernels::rms_norm_backward_dweight(ctx.device, x, d, inv, core_.weight.used_gradient(), core_.rows,
                                         core_.columns);
    });
  }

  std::int64_t saved_bytes(const context<Device>&, recompute = recompute::none) const {
    return core_.rows * static_cast<std::int64_t>(sizeof(S));
  }
  parameter_base<Precision, Device>& weight() { return core_.weight; }
  template <class F>
  void visit(F&& f) {
    f(core_.weight);
  }
  template <class F>
  void visit_collectives(F&& f, recompute = recompute::none) const {
    core_.visit_row_sum(f, "forward", 1);
    core_.visit_row_sum(f, "backward", 1);
  }

 private:
  detail::norm_core<Precision, Device> core_;
  double eps_;
};

/// LayerNorm (Ba et al. 2016) over the last dim of `Input`: y = (x - mean) / sqrt(var + eps) w + b, with the input's
/// spec. If the last dim is sharded, the sum and then the centred squares are reduced inside.
template <class Precision, spec_like Input, compute_device Device = cpu>
class layer_norm {
  using value = detail::norm_value<Input>;
  using T = activation_of<Precision>;
  using S = statistic_of<Precision>;

 public:
  using value_type = T;
  using device = Device;
  using input = Input;
  using output = Input;
  struct saved {
    buffer<Device> statistics;  ///< mean [rows], then 1 / deviation [rows]
  };
  static_assert(enforced<value, among<Input>, Input>);

  explicit layer_norm(context<Device>& ctx, double eps = 1e-5, const std::string& name = "norm",
                      const layout& stored = value::derivation.stored)
      : core_(ctx, layout_v<Input>, stored, value::derivation.used, name, true), eps_(eps) {}

  tensor<T, output, Device> forward(context<Device>& ctx, const tensor<T, input, Device>& x, saved* keep = nullptr,
                                    recompute = recompute::none) {
    tensor<T, output, Device> y(ctx);
    auto statistics = make_buffer<S>(ctx.device, static_cast<std::size_t>(2 * core_.rows));
    S* const mean = statistics.template data<S>();
    S* const inv = mean + core_.rows;
    const auto *w = core_.weight.used_value(), *b = core_.bias.used_value();
    if (!core_.row_group) {
      kernels::layer_norm_forward(ctx.device, x.data(), w, b, y.data(), mean, inv, core_.rows, core_.columns, eps_);
    } else {
      kernels::row_sums(ctx.device, x.data(), mean, core_.rows, core_.columns);
      core_.sum_rows(mean, core_.rows);
      kernels::row_centred_squares(ctx.device, x.data(), mean, inv, core_.rows, core_.columns, core_.columns_global);
      core_.sum_rows(inv, core_.rows);
      kernels::layer_norm_statistics(ctx.device, mean, inv, mean, inv, core_.rows, core_.columns_global, eps_);
      kernels::layer_norm_apply(ctx.device, x.data(), mean, inv, w, b, y.data(), core_.rows, core_.columns);
    }
    if (keep) keep->statistics = std::move(statistics);
    return y;
  }

  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(context<Device>& ctx, const tensor<T, input, Device>& x, saved& kept,
                                            const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, among<Input>, Gradient, output>);
    tensor<T, dual_t<input>, Device> dx(ctx);
    const S* const mean = kept.statistics.template data<S>();
    const S* const inv = mean + core_.rows;
    auto dots = make_buffer<S>(ctx.device, static_cast<std::size_t>(2 * core_.rows));
    kernels::layer_norm_backward_dots(ctx.device, x.data(), core_.weight.used_value(), dy.data(), mean, inv,
                                      dots.template data<S>(), core_.rows, core_.columns);
    core_.sum_rows(dots.template data<S>(), 2 * core_.rows);
    kernels::layer_norm_backward_dx(ctx.device, x.data(), core_.weight.used_value(), dy.data(), mean, inv,
                                    dots.template data<S>(), dx.data(), core_.rows, core_.columns,
                                    core_.columns_global);
    detail::with_gradient_kept(
        ctx, dy.data(), core_.rows * core_.columns, [this, &ctx, in = x.data(), mean, inv](const T* d) {
          kernels::layer_norm_backward_dweight(ctx.device, in, d, mean, inv, core_.weight.used_gradient(),
                                               core_.bias.used_gradient(), core_.rows, core_.columns);
        });
    return dx;
  }

  std::int64_t saved_bytes(const context<Device>&, recompute = recompute::none) const {
    return 2 * core_.rows * static_cast<std::int64_t>(sizeof(S));
  }
  template <class F>
  void visit(F&& f) {
    f(core_.weight);
    f(core_.bias);
  }
  template <class F>
  void visit_collectives(F&& f, recompute = recompute::none) const {
    core_.visit_row_sum(f, "forward", 1);
    core_.visit_row_sum(f, "forward", 1);
    core_.visit_row_sum(f, "backward", 2);
  }

 private:
  detail::norm_core<Precision, Device> core_;
  double eps_;
};

}  // namespace plait
