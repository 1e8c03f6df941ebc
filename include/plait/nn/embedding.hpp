#pragma once

#include <string>
#include <utility>

#include "plait/layout/errors.hpp"
#include "plait/nn/linear.hpp"

namespace plait {
namespace detail {

struct lookup_derivation {
  layout table, product, output;  ///< the table where it is used; the lookup's result; what it is brought to
  plait::verdict verdict;
};
constexpr lookup_derivation derive_lookup(const layout& ids, const layout& table, const layout& output) {
  lookup_derivation d;
  d.table = used_with(table, ids);
  d.output = output;
  const ruled product = lookup(d.table, ids, table.dims[0].dim);
  d.product = product.result;
  d.verdict = product.verdict;
  d.verdict.worsen(compare_dims(operand::output, d.product.dim_order(), output.dim_order()));
  if (d.verdict.ok()) d.verdict.worsen(only_moves(d.product, output, table.dims[0].axes));
  return d;
}

template <class Policy>
struct embedding_value {
  static constexpr lookup_derivation derivation = derive_lookup(
      layout_v<typename Policy::input>, layout_v<typename Policy::weight>, layout_v<typename Policy::output>);
  static constexpr verdict value = derivation.verdict;
};

}  // namespace detail

/// Token embedding under a policy that names `input` (the ids), `weight` (the table: vocabulary first) and `output`. A
/// vocabulary that is sharded makes the lookup partial; the output says how that is resolved: all-reduced, or
/// reduce-scattered onto the sequence.
template <class Precision, class Policy, compute_device Device = cpu>
class embedding {
  using value = detail::embedding_value<Policy>;
  using T = activation_of<Precision>;
  using W = weight_of<Precision>;
  using G = gradient_of<Precision>;

 public:
  using input = typename Policy::input;
  using weight_spec = typename Policy::weight;
  using output = typename Policy::output;
  using token = std::int64_t;
  static_assert(detail::policy_checked<Policy>);
  static_assert(enforced<value, Policy, input, weight_spec, output>);
  static_assert(enforced<detail::stored_value<Policy>, Policy, typename detail::stored_weight<Policy>::type>);
  static_assert(inside_mesh<Policy, input, output>);

  /// `vocab` is the true size of the vocabulary; the context's size of that dim may be larger (padded to divide).
  /// `foreign` is for a table of the caller's.
  embedding(context<Device>& ctx, std::int64_t vocab, const std::string& name = "embedding", initializer init = {},
            const parameter_memory<Precision>& foreign = {})
      : names_(name),
        vocab_(vocab),
        resolve_(value::derivation.product, value::derivation.output, ctx.ranks, ctx.sizes, "output of " + name),
        unresolve_(resolve_.backward(), ctx.ranks, ctx.sizes, "gradient of the output of " + name) {
    enforce(check_boundary(layout_v<input>, ctx.ranks.shape()), name + ": input");
    enforce(check_boundary(layout_v<output>, ctx.ranks.shape()), name + ": output");
    const box used = local_box(value::derivation.table, ctx.ranks.shape(), ctx.sizes, ctx.ranks.rank());
    const std::int64_t padded = used.global[0];
    if (vocab_ < 1 || vocab_ > padded)
      fail(name + ": vocab = " + std::to_string(vocab_) + ", must be 1 to the padded size " + std::to_string(padded));
    first_ = used.offset[0];
    rows_ = used.local[0];
    width_ = used.local[1];
    const auto n = static_cast<std::size_t>(rows_ * width_);
    if (!foreign.weight) memory_ = make_buffer<W>(ctx.device, n);
    if (!foreign.gradient) gradient_memory_ = make_buffer<G>(ctx.device, n);
    table_ = {ctx,
              {name + ".weight", {vocab_, used.global[1]}, init, true},
              layout_v<typename detail::stored_weight<Policy>::type>,
              value::derivation.table,
              foreign.weight ? foreign.weight : memory_.template data<W>(),
              foreign.gradient ? foreign.gradient : gradient_memory_.template data<G>()};
    tokens_ = resolve_.from().local_size() / width_;
  }

  tensor<T, output, Device> forward(context<Device>& ctx, const tensor<token, input, Device>& ids) {
    tensor<T, output, Device> y(ctx);
    forward(ctx, ids.data(), y.data());
    return y;
  }
  /// The same on the caller's memory: this rank's part of the ids and of the output.
  void forward(context<Device>& ctx, const token* ids, T* y) {
    const range shown(ctx.device, names_.forward());
    buffer<Device> product;
    T* out = y;
    if (!resolve_.trivial()) {
      product = make_buffer<T>(ctx.device, static_cast<std::size_t>(tokens_ * width_));
      out = product.template data<T>();
    }
    kernels::embedding_forward(ctx.device, ids, table_.used_value(), out, tokens_, width_, first_, rows_, vocab_);
    if (out != y) resolve_.run(ctx.device, out, y, dtype_of<T>);
  }

  /// Adds to the table's gradient; ids have none. Put off, it stays behind the gradient that a tied output projection
  /// puts off before it, so that the sum has the same bits; ids must live until then.
  template <spec_like Gradient>
  void backward(context<Device>& ctx, const tensor<token, input, Device>& ids, const tensor<T, Gradient, Device>& dy) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, Policy, Gradient, output>);
    backward(ctx, ids.data(), dy.data());
  }
  /// The same on the caller's memory.
  void backward(context<Device>& ctx, const token* ids, const T* dy) {
    const range shown(ctx.device, names_.backward());
    buffer<Device> slope;
    const T* d = dy;
    if (!unresolve_.trivial()) {
      slope = make_buffer<T>(ctx.device, static_cast<std::size_t>(tokens_ * width_));
      unresolve_.run(ctx.device, dy, slope.data(), dtype_of<T>);
      d = slope.template data<T>();
    }
    if (ctx.deferred && slope.empty()) {
      slope = make_buffer<T>(ctx.device, static_cast<std::size_t>(tokens_ * width_));
      ctx.device.copy(slope.data(), dy, slope.bytes(), ctx.device.main_stream());
      d = slope.template data<T>();
    }
    ctx.on_weights([this, &ctx, ids, d, slope = std::move(slope)] {
      const range weights_shown(ctx.device, names_.weights());
      kernels::embedding_backward(ctx.device, ids, d, table_.used_gradient(), tokens_, width_, first_, rows_, vocab_);
    });
  }

  parameter_base<Precision, Device>& weight() { return table_; }
  template <class F>
  void visit(F&& f) {
    f(table_);
  }
  template <class F>
  void visit_collectives(F&& f) const {
    resolve_.visit_collectives([&](const collective_cost& c) { f("forward", c); }, sizeof(T));
    unresolve_.visit_collectives([&](const collective_cost& c) { f("backward", c); }, sizeof(T));
  }

 private:
  range_names names_;
  std::int64_t vocab_, tokens_ = 0, first_ = 0, rows_ = 0, width_ = 0;
  executor resolve_, unresolve_;
  buffer<Device> memory_, gradient_memory_;
  parameter_base<Precision, Device> table_;
};

}  // namespace plait
