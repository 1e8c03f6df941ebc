#pragma once

#include <array>
#include <numeric>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/device/range.hpp"
#include "plait/layout/boundary.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/linear_rule.hpp"
#include "plait/nn/parameter.hpp"
#include "plait/nn/policy_check.hpp"
#include "plait/nn/recompute.hpp"

namespace plait {

/// The caller's memory for a layer's parameters: this rank's part, as it is used. Null: memory of the layer's own.
template <class Precision>
struct parameter_memory {
  weight_of<Precision>* weight = nullptr;
  gradient_of<Precision>* gradient = nullptr;
  weight_of<Precision>* bias = nullptr;
  gradient_of<Precision>* bias_gradient = nullptr;
};

/// What linears keep of a forward pass beyond their input: the gathered input, unless it is the input itself or is to
/// be gathered again.
template <compute_device Device>
struct linear_saved {
  buffer<Device> gathered;
};

namespace detail {

/// Whether a product on the device can add a row to each row of its result, and a matrix, in the same pass.
template <class Device, class T>
concept fuses_additions = requires(Device& d, std::int64_t n, const T* in, T* out) {
  d.gemm(false, true, n, n, n, 1.0, in, n, in, n, 0.0, out, n, {in, in});
};

}  // namespace detail

/// The computation of linears that share an input, without types: everything follows from a `linear_derivation`.
/// Weights lie one below the other in one matrix, so all products are one; the outputs of several lie side by side in
/// rows.
template <class Precision, compute_device Device, std::size_t N>
class linear_core {
 public:
  using T = activation_of<Precision>;
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;
  using parameter = parameter_base<Precision, Device>;
  struct branch_info {
    parameter_info weight;
    layout stored_weight;
    bool bias = false;
    parameter_info bias_info;
    layout stored_bias;
  };

  /// `foreign` holds the weights of all branches one after the other, and so their biases.
  linear_core(context<Device>& ctx, const linear_derivation<N>& d, std::array<branch_info, N> info,
              const parameter_memory<Precision>& foreign = {})
      : gather_(d.input, d.gathered, ctx.ranks, ctx.sizes, "input of " + info[0].weight.name),
        spread_(gather_.backward(), ctx.ranks, ctx.sizes, "gradient of the input of " + info[0].weight.name),
        resolve_(d.branches[0].product, d.branches[0].output, ctx.ranks, ctx.sizes, "output of " + info[0].weight.name),
        unresolve_(resolve_.backward(), ctx.ranks, ctx.sizes, "gradient of the output of " + info[0].weight.name),
        names_(std::string_view(info[0].weight.name).substr(0, info[0].weight.name.rfind(".weight"))) {
    const mesh_shape& mesh = ctx.ranks.shape();
    inner_ = 1;
    for (const dim_placement& p : d.input.dims) {
      const std::int64_t local = ctx.sizes.of(p.dim) / mesh.size(d.gathered.axes_of(p.dim));
      (d.branches[0].weight.has(p.dim) ? inner_ : rows_) *= local;
    }
    std::array<std::int64_t, N> sizes{}, bias_sizes{};
    for (std::size_t i = 0; i < N; ++i) {
      sizes[i] = local_elements(d.branches[i].weight, mesh, ctx.sizes);
      columns_[i] = sizes[i] / inner_;
      total_ += columns_[i];
      if (info[i].bias) bias_sizes[i] = local_elements(d.branches[i].bias, mesh, ctx.sizes);
      all_have_bias_ = all_have_bias_ && info[i].bias;
    }
    const auto memory = [&]<class Number>(buffer<Device>& own, Number* theirs, std::int64_t n) {
      if (!theirs) own = make_buffer<Number>(ctx.device, static_cast<std::size_t>(n));
      return theirs ? theirs : own.template data<Number>();
    };
    weight_ = memory(own_[0], foreign.weight, total_ * inner_);
    gradient_ = memory(own_[1], foreign.gradient, total_ * inner_);
    const std::int64_t biases = std::accumulate(bias_sizes.begin(), bias_sizes.end(), std::int64_t{0});
    bias_ = memory(own_[2], foreign.bias, biases);
    W *value = weight_, *bias_value = bias_;
    G *slope = gradient_, *bias_slope = memory(own_[3], foreign.bias_gradient, biases);
    for (std::size_t i = 0; i < N; ++i) {
      weights_[i] = {ctx, std::move(info[i].weight), info[i].stored_weight, d.branches[i].weight, value, slope};
      value += sizes[i], slope += sizes[i];
      if (!info[i].bias) continue;
      biases_[i] = {ctx, std::move(info[i].bias_info), info[i].stored_bias, d.branches[i].bias, bias_value, bias_slope};
      bias_value += bias_sizes[i], bias_slope += bias_sizes[i];
      has_bias_[i] = true;
    }
  }

  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return total_; }
  /// Elements of the output: of the resolved one for a single linear, of the rows side by side for several.
  std::int64_t output_size() const { return N == 1 ? resolve_.to().local_size() : rows_ * total_; }
  /// Bytes kept by a forward pass that keeps the gathered input.
  std::int64_t saved_bytes() const {
    return gather_.trivial() ? 0 : rows_ * inner_ * static_cast<std::int64_t>(sizeof(T));
  }

  /// `addend`, of the output's size, is added to it where it is not null; it must not be y.
  void forward(context<Device>& ctx, const T* x, T* y, linear_saved<Device>* keep, const T* addend = nullptr) {
    const range shown(ctx.device, names_.forward());
    buffer<Device> gathered = gather(ctx, x);
    const T* const input = gathered.empty() ? x : gathered.template data<T>();
    buffer<Device> product;
    T* out = y;
    if (N == 1 && !resolve_.trivial()) {
      product = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows_ * total_));
      out = product.template data<T>();
    }
    if (out == y) {
      const bool biased = multiply(ctx, true, total_, inner_, input, out, addend, true);
      if (!biased) add_biases(ctx, y);
    } else {
      multiply(ctx, true, total_, inner_, input, out, nullptr, false);
      resolve_.run(ctx.device, out, y, dtype_of<T>);
      add_biases(ctx, y);
      if (addend) kernels::accumulate(ctx.device, addend, y, output_size());
    }
    if (keep) keep->gathered = std::move(gathered);
  }

  /// dx is overwritten, with the sum of the gradient and `addend` where that is not null; addend must not be dx. If
  /// weight gradients are put off, x must live until they are computed; dy need not.
  void backward(context<Device>& ctx, const T* x, linear_saved<Device>& saved, const T* dy, T* dx,
                const T* addend = nullptr) {
    const range shown(ctx.device, names_.backward());
    buffer<Device> slope, kept_dy;
    const T* d = dy;
    if (ctx.deferred && (has_bias_[0] || unresolve_.trivial())) {
      kept_dy = make_buffer<T>(ctx.device, static_cast<std::size_t>(output_size()));
      ctx.device.copy(kept_dy.data(), dy, kept_dy.bytes(), ctx.device.main_stream());
      d = dy = kept_dy.template data<T>();
    }
    if (N == 1 && !unresolve_.trivial()) {
      slope = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows_ * total_));
      unresolve_.run(ctx.device, dy, slope.data(), dtype_of<T>);
      d = slope.template data<T>();
    }
    if (saved.gathered.empty()) saved.gathered = gather(ctx, x);
    if (dx) {
      buffer<Device> gathered;
      T* out = dx;
      if (!spread_.trivial()) {
        gathered = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows_ * inner_));
        out = gathered.template data<T>();
      }
      multiply(ctx, false, inner_, total_, d, out, out == dx ? addend : nullptr, false);
      if (out != dx) {
        spread_.run(ctx.device, out, dx, dtype_of<T>);
        if (addend) kernels::accumulate(ctx.device, addend, dx, spread_.to().local_size());
      }
    }
    ctx.on_weights([this, &ctx, x, dy, d, slope = std::move(slope), kept_dy = std::move(kept_dy),
                    input = std::move(saved.gathered)]() mutable {
      const range weights_shown(ctx.device, names_.weights());
      const T* const in = input.empty() ? x : input.template data<T>();
      ctx.device.gemm(true, false, total_, inner_, rows_, 1.0, d, total_, in, inner_, 1.0, gradient_, inner_);
      bias_gradients(ctx, dy);
    });
  }

  parameter& weight(std::size_t i) { return weights_[i]; }
  parameter& bias(std::size_t i) { return biases_[i]; }
  template <class F>
  void visit(F&& f) {
    for (std::size_t i = 0; i < N; ++i) {
      f(weights_[i]);
      if (has_bias_[i]) f(biases_[i]);
    }
  }

  /// Calls f(pass, cost) for every collective of a forward and a backward pass.
  template <class F>
  void visit_collectives(F&& f, recompute policy = recompute::none) const {
    const auto in = [&](const char* pass) { return [&f, pass](const collective_cost& c) { f(pass, c); }; };
    gather_.visit_collectives(in("forward"), sizeof(T));
    if (N == 1) resolve_.visit_collectives(in("forward"), sizeof(T));
    if (N == 1) unresolve_.visit_collectives(in("backward"), sizeof(T));
    if (policy != recompute::none) gather_.visit_collectives(in("backward"), sizeof(T));
    spread_.visit_collectives(in("backward"), sizeof(T));
  }

 private:
  buffer<Device> gather(context<Device>& ctx, const T* x) {
    if (gather_.trivial()) return {};
    buffer<Device> gathered = make_buffer<T>(ctx.device, static_cast<std::size_t>(rows_ * inner_));
    gather_.run(ctx.device, x, gathered.data(), dtype_of<T>);
    return gathered;
  }

  /// out [rows, n] = a [rows, k] times the weight, or its transpose, plus `addend` and the biases where they are
  /// wanted. What the device adds in the product's own pass costs none of its own. False if the biases are still to be
  /// added.
  bool multiply(context<Device>& ctx, bool transposed, std::int64_t n, std::int64_t k, const T* a, T* out,
                const T* addend, bool biases) {
    // cuBLASLt's table of types names no bias for double.
    constexpr bool fuses_bias = std::is_same_v<W, T> && !std::is_same_v<T, double>;
    const bool with_bias = fuses_bias && biases && all_have_bias_;
    if constexpr (detail::fuses_additions<Device, T>) {
      const T* bias = nullptr;
      if constexpr (fuses_bias) bias = with_bias ? bias_ : nullptr;
      ctx.device.gemm(false, transposed, rows_, n, k, 1.0, a, k, weight_, inner_, addend ? 1.0 : 0.0, out, n,
                      {bias, addend});
      return with_bias;
    } else {
      ctx.device.gemm(false, transposed, rows_, n, k, 1.0, a, k, weight_, inner_, 0.0, out, n);
      if (addend) kernels::accumulate(ctx.device, addend, out, rows_ * n);
      return false;
    }
  }

  /// Calls f(parameter, offset in a row, columns, row stride) for each bias; rows are those of the output.
  template <class F>
  void each_bias(F&& f) {
    std::int64_t at = 0;
    for (std::size_t i = 0; i < N; ++i) {
      const std::int64_t n = has_bias_[i] ? biases_[i].used_size() : columns_[i];
      if (has_bias_[i]) f(biases_[i], at, n, N == 1 ? n : total_);
      at += n;
    }
  }
  void add_biases(context<Device>& ctx, T* y) {
    each_bias([&](parameter& b, std::int64_t at, std::int64_t n, std::int64_t stride) {
      kernels::add_bias(ctx.device, b.used_value(), y + at, output_size() / stride, n, stride);
    });
  }
  void bias_gradients(context<Device>& ctx, const T* dy) {
    each_bias([&](parameter& b, std::int64_t at, std::int64_t n, std::int64_t stride) {
      kernels::bias_gradient(ctx.device, dy + at, b.used_gradient(), output_size() / stride, n, stride);
    });
  }

  executor gather_, spread_, resolve_, unresolve_;
  range_names names_;
  std::int64_t rows_ = 1, inner_ = 1, total_ = 0;
  std::array<std::int64_t, N> columns_{};
  std::array<buffer<Device>, 4> own_;  ///< weights, gradients, biases and theirs: of all branches, one after the other
  W *weight_ = nullptr, *bias_ = nullptr;
  G* gradient_ = nullptr;
  std::array<parameter, N> weights_;
  std::array<parameter, N> biases_;
  std::array<bool, N> has_bias_{};
  bool all_have_bias_ = true;
};

/// Whether a policy that names its `mesh` mentions all its axes in the given specs; refuses to compile otherwise.
template <class Policy, class... Specs>
inline constexpr bool inside_mesh = [] {
  if constexpr (requires { typename Policy::mesh; })
    return (boundary<Specs, typename Policy::mesh, Policy> && ...);
  else
    return true;
}();

namespace detail {

template <class Policy>
struct stored_weight {
  using type = typename Policy::weight;
};
template <class Policy>
  requires requires { typename Policy::stored; }
struct stored_weight<Policy> {
  using type = typename Policy::stored;
};

template <class Policy>
struct stored_value {
  static constexpr verdict value = check_stored(layout_v<typename stored_weight<Policy>::type>);
};

template <class... Policies>
struct linear_value {
  using first = type_at<0, type_list<Policies...>>;
  static constexpr std::size_t count = sizeof...(Policies);
  static constexpr linear_derivation<count> derivation =
      derive_linear<count>(layout_v<typename first::input>, {layout_v<typename Policies::weight>...},
                           {layout_v<typename Policies::output>...});
  static constexpr verdict value = [] {
    verdict v = derivation.verdict;
    for (std::size_t i = 0; i < count; ++i) {
      const linear_layouts& b = derivation.branches[i];
      if (count > 1 && v.ok()) v.worsen(only_moves(b.product, b.output, {}));
    }
    return v;
  }();
};
template <class Policy>
inline constexpr bool has_bias = [] {
  if constexpr (requires { typename std::bool_constant<Policy::bias>; })
    return Policy::bias;
  else
    return false;
}();
template <class Policy>
struct bias_value {
  static constexpr verdict value =
      has_bias<Policy> ? check_bias(linear_value<Policy>::derivation.branches[0]) : verdict{};
};
template <class Given, class Expected>
struct dual_value_check {
  static constexpr verdict value = [] {
    const layout given = layout_v<Given>, expected = dual(layout_v<Expected>);
    if (const verdict v = compare_dims(operand::gradient, expected.dim_order(), given.dim_order()); !v.ok()) return v;
    for (axis_id axis : differing_axes(given, expected))
      return verdict{rule::wrong_dual, axis, given.sharded_by(axis), given.state_of(axis), expected.state_of(axis)};
    return verdict{};
  }();
};

}  // namespace detail

/// A linear layer, y = x W' (+ b), under a policy: a struct that names `input`, `weight` and `output` specs, and may
/// have
///
///     static constexpr bool bias = true;
///     using stored = spec<...>;          // how the weight lies between steps, if not as `weight`
///     using mesh = ...;                  // whose axes input and output then must all mention, checked at compile time
///
/// The weight's dims are the output's own, then the contracted ones. Everything else is derived: column-parallel,
/// row-parallel, with sequence parallelism or without, are only specs. Collectives happen on axes that shard the
/// weight.
///
/// `Precision` is a number type, or a struct for which `plait::precision` names them.
template <class Precision, class Policy, compute_device Device = cpu>
class linear {
  using value = detail::linear_value<Policy>;
  using T = activation_of<Precision>;

 public:
  using value_type = T;
  using device = Device;
  using input = typename Policy::input;
  using weight = typename Policy::weight;
  using output = typename Policy::output;
  using saved = linear_saved<Device>;
  static constexpr linear_derivation<1> derivation = value::derivation;
  static_assert(detail::policy_checked<Policy>);
  static_assert(enforced<value, Policy, input, weight, output>);
  static_assert(enforced<detail::bias_value<Policy>, Policy, input, weight, output>);
  static_assert(enforced<detail::stored_value<Policy>, Policy, typename detail::stored_weight<Policy>::type>);
  static_assert(inside_mesh<Policy, input, output>);

  /// Owns its parameters, or views the caller's weight and gradient (this rank's part, in the weight's spec). `shape`
  /// is the weight's logical shape, if its leading dim is padded or checkpoints know it under another one.
  explicit linear(context<Device>& ctx, std::string name = "linear", std::vector<std::int64_t> shape = {},
                  weight_of<Precision>* foreign_weight = nullptr, gradient_of<Precision>* foreign_gradient = nullptr,
                  initializer init = {})
      : linear(ctx, std::move(name), std::move(shape), {foreign_weight, foreign_gradient}, init) {}
  /// The same with a bias of the caller's as well.
  linear(context<Device>& ctx, std::string name, std::vector<std::int64_t> shape,
         const parameter_memory<Precision>& foreign, initializer init = {})
      : core_(ctx, derivation, {describe_branch(ctx, name, std::move(shape), init)}, foreign) {
    enforce(check_boundary(layout_v<input>, ctx.ranks.shape()), name + ": input");
    enforce(check_boundary(layout_v<output>, ctx.ranks.shape()), name + ": output");
  }

  /// `addend` is added to the output where it is not null: on a GPU, in the product's own pass over it.
  tensor<T, output, Device> forward(context<Device>& ctx, const tensor<T, input, Device>& x, saved* keep = nullptr,
                                    recompute policy = recompute::none,
                                    const tensor<T, output, Device>* addend = nullptr) {
    tensor<T, output, Device> y(ctx);
    core_.forward(ctx, x.data(), y.data(), policy == recompute::none ? keep : nullptr,
                  addend ? addend->data() : nullptr);
    return y;
  }
  /// The same on the caller's memory: this rank's part of the input and of the output.
  void forward(context<Device>& ctx, const T* x, T* y, saved* keep = nullptr) { core_.forward(ctx, x, y, keep); }

  /// Takes the gradient of the output and returns that of the input, plus `addend` where that is not null; adds to the
  /// weight's gradient. `x` is the input of the forward pass, which the caller has kept.
  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(context<Device>& ctx, const tensor<T, input, Device>& x, saved& kept,
                                            const tensor<T, Gradient, Device>& dy,
                                            const tensor<T, dual_t<input>, Device>* addend = nullptr) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, Policy, Gradient, output>);
    tensor<T, dual_t<input>, Device> dx(ctx);
    core_.backward(ctx, x.data(), kept, dy.data(), dx.data(), addend ? addend->data() : nullptr);
    return dx;
  }
  /// The same on the caller's memory. dx may be null: then only the weights' gradients are computed.
  void backward(context<Device>& ctx, const T* x, saved& kept, const T* dy, T* dx) {
    core_.backward(ctx, x, kept, dy, dx);
  }

  /// Bytes that a forward pass keeps besides its input.
  std::int64_t saved_bytes(const context<Device>&, recompute policy = recompute::none) const {
    return policy == recompute::none ? core_.saved_bytes() : 0;
  }
  parameter_base<Precision, Device>& parameter() { return core_.weight(0); }
  template <class F>
  void visit(F&& f) {
    core_.visit(f);
  }
  template <class F>
  void visit_collectives(F&& f, recompute policy = recompute::none) const {
    core_.visit_collectives(f, policy);
  }

 private:
  static typename linear_core<Precision, Device, 1>::branch_info describe_branch(context<Device>& ctx,
                                                                                 const std::string& name,
                                                                                 std::vector<std::int64_t> shape,
                                                                                 initializer init) {
    const layout& bias = derivation.branches[0].bias_stored;
    if (shape.empty()) shape = sizes_of(ctx, layout_v<weight>);
    return {{name + ".weight", std::move(shape), init, true},
            layout_v<typename detail::stored_weight<Policy>::type>,
            detail::has_bias<Policy>,
            {name + ".bias", sizes_of(ctx, bias), {0, 0}, false},
            bias};
  }
  static std::vector<std::int64_t> sizes_of(context<Device>& ctx, const layout& a) {
    std::vector<std::int64_t> sizes;
    for (const dim_placement& p : a.dims) sizes.push_back(ctx.sizes.of(p.dim));
    return sizes;
  }

  linear_core<Precision, Device, 1> core_;
};

}  // namespace plait
