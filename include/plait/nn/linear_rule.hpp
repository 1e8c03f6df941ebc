#pragma once

#include <array>

#include "plait/layout/make_plan.hpp"
#include "plait/layout/rules.hpp"

namespace plait {

/// The layouts of one linear: of the weight and bias where they are used, of the product before it is brought to the
/// output, and of the output.
struct linear_layouts {
  layout weight, product, bias_stored, bias, output;
};

/// Everything that follows from the specs of up to four linears with one input.
template <std::size_t N>
struct linear_derivation {
  layout input;     ///< at the boundary
  layout gathered;  ///< the input as the products need it
  std::array<linear_layouts, N> branches{};
  plait::verdict verdict;
};

namespace detail {

constexpr bool contracted(const layout& input, const layout& weight, dim_id dim) {
  return input.has(dim) && weight.has(dim);
}

/// The input as a linear with this weight needs it: replicated over the axes that shard the weight's own dims, sharded
/// like the weight over the axes of contracted dims, and as it is on all others.
constexpr void gather_for(layout& gathered, const layout& input, const layout& weight, verdict& v) {
  for (const dim_placement& p : weight.dims) {
    const bool summed = contracted(input, weight, p.dim);
    for (axis_id axis : p.axes) {
      const dim_id there = gathered.sharded_by(axis);
      if (summed ? there == p.dim : gathered.state_of(axis) == state::replicated) continue;
      if (!summed && there && contracted(input, weight, there)) {
        v.worsen({rule::contraction_sharded, axis, there, state::varying, state::varying});
        continue;
      }
      if (there) {
        axis_list& axes = gathered.dims[static_cast<std::size_t>(gathered.find(there))].axes;
        axes.erase(static_cast<std::size_t>(axes.find(axis)));
      }
      if (summed)
        gathered.append(p.dim, axis);
      else
        gathered.set(axis, state::replicated);
    }
  }
  for (const dim_placement& p : input.dims)  // what the weight does not shard must not be sharded here
    if (weight.has(p.dim))
      for (axis_id axis : gathered.axes_of(p.dim))
        if (!weight.axes_of(p.dim).contains(axis))
          v.worsen({rule::contraction_sharded, axis, p.dim, state::varying, weight.state_of(axis)});
}

/// A parameter where it is used: replicated over every axis on which its partner varies or is replicated and it is not
/// sharded itself, so that its gradient is partial there.
constexpr layout used_with(layout parameter, const layout& partner) {
  for (axis_id axis : partner.mentioned()) {
    if (parameter.state_of(axis) != state::invariant) continue;
    const state s = partner.state_of(axis);
    if (s != state::invariant) parameter.set(axis, state::replicated);
  }
  return parameter;
}

/// The moves between two layouts may only use the axes that `named` contains.
constexpr verdict only_moves(const layout& from, const layout& to, const axis_list& named) {
  for (axis_id axis : differing_axes(from, to))
    if (!named.contains(axis))
      return {rule::move_not_named, axis, from.sharded_by(axis) ? from.sharded_by(axis) : to.sharded_by(axis),
              from.state_of(axis), to.state_of(axis)};
  return {};
}

constexpr axis_list sharding_axes(const layout& a) {
  axis_list axes;
  for (const dim_placement& p : a.dims)
    for (axis_id axis : p.axes) axes.push_back(axis);
  return axes;
}

}  // namespace detail

namespace detail {

/// The dims must be: input = rest, contracted; weight = own, contracted; output = rest, own; each in this order.
constexpr verdict check_dims_of_linear(const layout& input, const layout& weight, const layout& output) {
  dim_list rest, summed, own;
  for (dim_id dim : input.dim_order()) (weight.has(dim) ? summed : rest).push_back(dim);
  for (dim_id dim : weight.dim_order())
    if (!input.has(dim)) own.push_back(dim);
  const auto followed_by = [](dim_list list, const dim_list& more) {
    for (dim_id dim : more) list.push_back(dim);
    return list;
  };
  if (summed.empty() && !rest.empty()) {  // the weight must contract something: the input's last dim, with its own last
    if (!own.empty()) own.pop_back();
    own.push_back(rest.back());
    return compare_dims(operand::weight, own, weight.dim_order());
  }
  verdict v = compare_dims(operand::input, followed_by(rest, summed), input.dim_order());
  if (v.ok()) v = compare_dims(operand::weight, followed_by(own, summed), weight.dim_order());
  if (v.ok()) v = compare_dims(operand::output, followed_by(rest, own), output.dim_order());
  return v;
}

}  // namespace detail

/// Linears y_i = x W_i' (+ b_i) that share their input x: `weights[i]` has the output's own dims, then the contracted
/// ones; `outputs[i]` has the input's remaining dims, then the weight's own. The input is gathered once for all of
/// them, and their partial gradients will be summed before one reduction. Implicit moves happen only on axes that shard
/// a weight.
template <std::size_t N>
constexpr linear_derivation<N> derive_linear(const layout& input, const std::array<layout, N>& weights,
                                             const std::array<layout, N>& outputs) {
  linear_derivation<N> d;
  d.input = d.gathered = input;
  axis_list named;
  for (axis_id axis : input.partial)
    d.verdict.worsen({rule::unresolved_partial, axis, {}, state::partial, state::partial});
  for (const layout& w : weights) {
    named = union_of(named, detail::sharding_axes(w));
    detail::gather_for(d.gathered, input, w, d.verdict);
  }
  d.verdict.worsen(detail::only_moves(input, d.gathered, named));
  for (std::size_t i = 0; i < N; ++i) {
    linear_layouts& b = d.branches[i];
    b.weight = detail::used_with(weights[i], d.gathered);
    b.output = outputs[i];
    if (const verdict v = detail::check_dims_of_linear(input, weights[i], outputs[i]); !v.ok()) {
      d.verdict.worsen(v);
      continue;
    }
    const ruled product = contract(d.gathered, b.weight, outputs[i].dim_order());
    d.verdict.worsen(product.verdict);
    b.product = product.result;
    if (d.verdict.ok()) d.verdict.worsen(detail::only_moves(b.product, b.output, detail::sharding_axes(weights[i])));
    for (const dim_placement& p : outputs[i].dims)
      if (!input.has(p.dim)) b.bias_stored.dims.push_back(p);
    b.bias = detail::used_with(b.bias_stored, b.output);
  }
  return d;
}

/// The bias is added to the output, after its reduction; an output that is still partial takes none.
constexpr verdict check_bias(const linear_layouts& b) { return pointwise(combine::sum, {&b.output, &b.bias}).verdict; }

}  // namespace plait
