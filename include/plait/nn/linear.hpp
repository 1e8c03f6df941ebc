// The linear layer under a policy of three specs. Column-parallel and row-parallel linears are policies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/layout/check.hpp"
#include "plait/layout/errors.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear/core.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/tensor/check_values.hpp"

namespace plait {

/// If a policy names its `mesh`, refuses to compile unless the given specs mention all axes of that mesh.
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
  static constexpr verdict value = derivation.verdict;
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
/// The layout of the bias between steps: `Policy::stored` applied to the weight's own dims.
template <class Policy>
struct stored_bias {
  static constexpr layout value = [] {
    layout a = linear_value<Policy>::derivation.branches[0].bias_placed;
    const layout weight = layout_v<typename Policy::weight>, stored = layout_v<typename stored_weight<Policy>::type>;
    for (dim_placement& p : a.dims)
      if (stored.has(p.dim) && p.axes == weight.axes_of(p.dim)) p.axes = stored.axes_of(p.dim);
    return a;
  }();
};

struct any_linear {
  using input = spec<seq, hidden>;
  using weight = spec<ffn, hidden>;
  using output = spec<seq, ffn>;
};
template <class Policy>
using linear_policy = typename policy_or<Policy, any_linear>::type;

/// Throws if a mesh or sizes do not fit the specs of a linear.
inline void check_linear(const layout& input, const layout& weight, const layout& output, const mesh_shape& mesh,
                         const dim_sizes& sizes, const std::string& name) {
  enforce(check_boundary(input, mesh), name + ": input");
  enforce(check_boundary(output, mesh), name + ": output");
  enforce_parts(weight, mesh, sizes, name);
}

}  // namespace detail

/// Options of a linear: its initial values, its memory and its adapter.
template <class Precision, compute_device Device>
struct linear_options {
  /// The weight's logical shape, if its leading dim is padded or checkpoints use another shape.
  std::vector<std::int64_t> shape{};
  initializer init{};
  initializer bias_init{0, 0};
  /// The caller's memory for weight, gradient and bias: this rank's part, in the layout of use.
  parameter_memory<Precision> memory{};
  /// Another layer's parameter to use as weight, for a tied output projection.
  parameter_ptr<Precision, Device> tied{};
  /// See `parameter_info`.
  bool tied_across_stages = false;
  /// See `parameter_info`: false for the head of a model. It is false in any case if the weight is tied across stages.
  bool hidden_layer = true;
  /// A low-rank adapter, which freezes weight and bias.
  lora_options lora{};
  /// The number of chunks of `overlap`, if it is chosen at run time; 0: the policy's.
  std::int64_t overlap = 0;
};

/// A linear layer, y = x W' (+ b), under a policy: a struct with `input`, `weight` and `output` specs and these
/// optional members:
///
///     static constexpr bool bias = true;
///     using stored = spec<...>;          // the weight's layout between steps, if not `weight`; also a bias's
///     using overlap = pl::overlap<4>;    // nn/linear/policy.hpp: collectives in 4 chunks, which overlap the products
///     using mesh = ...;                  // the mesh whose axes input and output must all mention, checked at compile time
///
/// The weight's dims are the output's own, then the contracted ones, or the reverse (GPT-2 stores [in, out]). plait
/// derives everything else from the three specs, for column-parallel and row-parallel linears, with or without sequence
/// parallelism. Collectives happen only on axes that shard the weight. A leading dim in all three specs is a batch of
/// products, such as one per expert.
///
/// `Precision` is a number type, or a struct for which `plait::precision` names them.
template <class Precision, class Policy, compute_device Device = cpu>
class linear : public layer_types<activation_of<Precision>, typename detail::linear_policy<Policy>::input,
                                  typename detail::linear_policy<Policy>::output, Device>,
               public other_arrays<linear<Precision, Policy, Device>, activation_of<Precision>,
                                   typename detail::linear_policy<Policy>::input,
                                   typename detail::linear_policy<Policy>::output, Device> {
  using policy = detail::linear_policy<Policy>;
  using value = detail::linear_value<policy>;
  using T = activation_of<Precision>;

 public:
  using input = typename policy::input;
  using weight_spec = typename policy::weight;
  using output = typename policy::output;
  using saved = linear_saved<Device>;
  using options = linear_options<Precision, Device>;
  static constexpr linear_derivation<1> derivation = value::derivation;
  static_assert(detail::policy_checked<Policy>);
  static_assert(detail::overlap_checked<policy>);
  static_assert(enforced<value, policy, input, weight_spec, output>);
  static_assert(enforced<detail::bias_value<policy>, policy, input, weight_spec, output>);
  static_assert(enforced<detail::stored_value<policy>, policy, typename detail::stored_weight<policy>::type>);
  static_assert(inside_mesh<policy, input, output>);
  using other_arrays<linear, T, input, output, Device>::forward;
  using other_arrays<linear, T, input, output, Device>::backward;

  explicit linear(const context<Device>& ctx, std::string name = "linear", options how = {})
      : core_(checked(ctx, name), derivation, {describe_branch(ctx, name, how)}, how.memory, how.tied,
              detail::chosen_overlap<policy>(how.overlap, name)) {}

  /// Adds `addend` to the output unless it is null; on a GPU the product does so in its own pass.
  tensor<T, output, Device> forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                    saved* keep = nullptr, const tensor<T, output, Device>* addend = nullptr) {
    tensor<T, output, Device> y(mb.ctx);
    forward(mb, x, y, keep, addend);
    return y;
  }
  /// This overload writes into an existing tensor, such as a view of the caller's memory. It must be neither x nor the
  /// addend.
  void forward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, tensor<T, output, Device>& y,
               saved* keep = nullptr, const tensor<T, output, Device>* addend = nullptr) {
    detail::require_size(weight()->name(), "x", x.size(), core_.input_size());
    detail::require_size(weight()->name(), "y", y.size(), core_.output_size());
    core_.forward(mb, x.data(), y.data(), keep, detail::addend_array(weight()->name(), addend, core_.output_size()));
    detail::note_forward(mb, *this, layout_v<input>, weight()->name(), x.data(), core_.input_size());
  }
  /// Forward on the caller's memory. Throws if the context or an array has other sizes than at the layer's construction
  /// or last resize.
  void forward(const microbatch<Device>& mb, const part<const T, input>& x, const part<T, output>& y,
               saved* keep = nullptr, const part<const T, output>& addend = {}) {
    core_.require_context(mb.ctx);
    detail::require_part(weight()->name(), "x", x, core_.input_size());
    detail::require_part(weight()->name(), "y", y, core_.output_size());
    detail::require_part(weight()->name(), "addend", addend, core_.output_size());
    core_.forward(mb, x.unchecked(), y.unchecked(), keep, addend.unchecked());
    detail::note_forward(mb, *this, layout_v<input>, weight()->name(), x.unchecked(), core_.input_size());
  }

  /// Takes the gradient of the output, and returns the gradient of the input plus `addend`, unless that is null. Adds
  /// to the weight's gradient. `x` is the input of the forward pass, which the caller has kept.
  template <spec_like Gradient>
  tensor<T, dual_t<input>, Device> backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x,
                                            saved& kept, const tensor<T, Gradient, Device>& dy,
                                            const tensor<T, dual_t<input>, Device>* addend = nullptr) {
    tensor<T, dual_t<input>, Device> dx(mb.ctx);
    backward(mb, x, kept, dy, dx, addend);
    return dx;
  }
  /// This overload writes into an existing tensor, which must be none of x, dy and the addend.
  template <spec_like Gradient>
  void backward(const microbatch<Device>& mb, const tensor<T, input, Device>& x, saved& kept,
                const tensor<T, Gradient, Device>& dy, tensor<T, dual_t<input>, Device>& dx,
                const tensor<T, dual_t<input>, Device>* addend = nullptr) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, policy, Gradient, output>);
    detail::require_size(weight()->name(), "x", x.size(), core_.input_size());
    detail::require_size(weight()->name(), "dy", dy.size(), core_.output_size());
    detail::require_size(weight()->name(), "dx", dx.size(), core_.input_size());
    core_.backward(mb, x.data(), kept, dy.data(), dx.data(),
                   detail::addend_array(weight()->name(), addend, core_.input_size()));
    detail::note_backward(mb, detail::dual_v<output>, weight()->name(), dy.data(), core_.output_size());
  }
  /// This overload works on the caller's memory. If dx is `{}`, it computes only the gradients of the parameters.
  template <class Numbers, spec_like Gradient>
  void backward(const microbatch<Device>& mb, const part<const T, input>& x, saved& kept,
                const part<Numbers, Gradient>& dy, const part<T, dual_t<input>>& dx,
                const part<const T, dual_t<input>>& addend = {}) {
    static_assert(enforced<detail::dual_value_check<Gradient, output>, policy, Gradient, output>);
    const part<const T, Gradient> d = dy;
    core_.require_context(mb.ctx);
    detail::require_part(weight()->name(), "x", x, core_.input_size());
    detail::require_part(weight()->name(), "dy", d, core_.output_size());
    detail::require_part(weight()->name(), "dx", dx, core_.input_size());
    detail::require_part(weight()->name(), "addend", addend, core_.input_size());
    core_.backward(mb, x.unchecked(), kept, d.unchecked(), dx.unchecked(), addend.unchecked());
    detail::note_backward(mb, detail::dual_v<output>, weight()->name(), d.unchecked(), core_.output_size());
  }

  /// Prepares the layer for the sizes of this context, in the world of its construction. Batches and lengths may
  /// change; the weight's dims may not. Parameters stay the same; the `saved` of earlier forward passes becomes
  /// invalid.
  void resize(const context<Device>& ctx) { core_.resize(ctx, derivation); }
  /// Binds the layer's parameters to other memory that the caller owns. It must hold values, and gradients that are
  /// zero or a begun sum. The caller names everything that it gave to the constructor, and `pl::own_memory` for the
  /// rest. A weight with masters must be gathered before its next use. Throws, and changes nothing, if it would replace
  /// memory that the layer owns or borrows. A tied weight is bound by its own layer.
  void rebind(const parameter_memory<Precision>& memory) { core_.rebind(memory); }

  bool adds_in_product() const { return core_.adds_in_product(); }
  const parameter_ptr<Precision, Device>& weight() const { return core_.weight(0); }
  /// Null without a bias.
  const parameter_ptr<Precision, Device>& bias() const { return core_.bias(0); }
  template <class F>
  void visit(F&& f) {
    core_.visit(f);
  }

 private:
  static const context<Device>& checked(const context<Device>& ctx, const std::string& name) {
    detail::check_linear(layout_v<input>, layout_v<weight_spec>, layout_v<output>, ctx.ranks.shape(), ctx.sizes, name);
    return ctx;
  }
  static linear_branch describe_branch(const context<Device>& ctx, const std::string& name, const options& how) {
    const layout& bias = derivation.branches[0].bias_placed;
    return {{name + ".weight", how.shape.empty() ? sizes_of(ctx, layout_v<weight_spec>) : how.shape, how.init, true,
             how.tied_across_stages, how.hidden_layer && !how.tied_across_stages},
            layout_v<typename detail::stored_weight<policy>::type>,
            detail::has_bias<policy>,
            {name + ".bias", sizes_of(ctx, bias), how.bias_init, false},
            detail::stored_bias<policy>::value,
            how.lora};
  }
  static std::vector<std::int64_t> sizes_of(const context<Device>& ctx, const layout& a) {
    std::vector<std::int64_t> sizes;
    for (const dim_placement& p : a.dims) sizes.push_back(ctx.sizes.of(p.dim));
    return sizes;
  }

  linear_core<Precision, Device> core_;
};

}  // namespace plait

namespace plait::detail {

// Describes one linear inside attention or an MLP, from a strategy. A branch here is one of several linears with one
// input.

/// Describes the branch of a weight with layout `weight`, whose linear has an input with layout `input`. As a matrix,
/// the output's dims form one dim and the contracted dims another, as Hugging Face stores them.
inline linear_branch describe_matrix(const layout& weight, const layout& input, const dim_sizes& sizes,
                                     const std::string& name, initializer init, const lora_options& lora) {
  std::int64_t own = 1, summed = 1;
  for (const dim_placement& p : weight.dims) (input.has(p.dim) ? summed : own) *= sizes.of(p.dim);
  linear_branch branch{{name + ".weight", {own, summed}, init, true}, {}, false,
                       {name + ".bias", {own}, {0, 0}, false},        {}, lora};
  return branch;
}

/// Describes one branch of a sublayer's linears: the checkpoint names of its weight and bias, and their stored layouts.
template <class Policy, compute_device Device>
linear_branch describe_branch(const context<Device>& ctx, const std::string& name, initializer init, bool bias,
                              const lora_options& lora = {}) {
  linear_branch branch =
      describe_matrix(layout_v<typename Policy::weight>, layout_v<typename Policy::input>, ctx.sizes, name, init, lora);
  branch.stored_weight = layout_v<typename Policy::stored>;
  branch.stored_bias = stored_bias<Policy>::value;
  branch.bias = bias;
  return branch;
}

}  // namespace plait::detail
