// The derivation of linears: constexpr functions from the layouts of input, weights and outputs to all layouts in
// between.
#pragma once

#include <array>
#include <span>

#include "plait/layout/plan.hpp"
#include "plait/nn/parameter/info.hpp"

namespace plait {

/// The layouts of one linear. Weight and bias each have two: as placed (without replication) and as used. `product` is
/// the layout before the redistribution to `output`.
struct linear_layouts {
  layout placed, weight, product, bias_placed, bias, output;
  bool inputs_first = false;  ///< whether the weight's contracted dims precede its own: [in, out], as in GPT-2
};

/// A view of the derivation of any number of linears with one input.
struct shared_linears {
  const layout& input;     ///< at the boundary
  const layout& gathered;  ///< the input in the layout that the products need
  std::span<const linear_layouts> branches;
};

/// All layouts that are derived from the specs of N linears with one input.
template <std::size_t N>
struct linear_derivation {
  layout input;     ///< at the boundary
  layout gathered;  ///< the input in the layout that the products need
  std::array<linear_layouts, N> branches{};
  plait::verdict verdict;

  constexpr operator shared_linears() const { return {input, gathered, branches}; }  // NOLINT: converts on purpose
};

namespace detail {

constexpr bool contracted(const layout& input, const layout& weight, const layout& output, dim_id dim) {
  return input.has(dim) && weight.has(dim) && !output.has(dim);
}

/// Finds the layout of the input that a linear with this weight needs. It is replicated over the axes that shard the
/// weight's own dims, and sharded like the weight over the axes of contracted dims. On all other axes it equals the
/// input's layout. Batch dims, which all three tensors have, must have equal placements already.
constexpr void gather_for(layout& gathered, const layout& input, const layout& weight, const layout& output,
                          verdict& v) {
  for (const dim_placement& p : weight.dims) {
    const bool summed = contracted(input, weight, output, p.dim);
    if (!summed && input.has(p.dim)) continue;
    for (axis_id axis : p.axes) {
      const dim_id there = gathered.sharded_by(axis);
      if (summed ? there == p.dim : gathered.state_of(axis) == state::replicated) continue;
      if (!summed && there && contracted(input, weight, output, there)) {
        v.worsen({layout_error::contraction_sharded, axis, there, state::varying, state::varying});
        continue;
      }
      if (summed)
        gathered.append(p.dim, axis);
      else
        gathered.set(axis, state::replicated);
    }
  }
  for (const dim_placement& p : input.dims)  // a dim that the weight has whole must be whole here
    if (contracted(input, weight, output, p.dim))
      for (axis_id axis : gathered.axes_of(p.dim))
        if (!weight.axes_of(p.dim).contains(axis))
          v.worsen({layout_error::contraction_sharded, axis, p.dim, state::varying, weight.state_of(axis)});
}

/// The verdict that refuses moves between two layouts on axes outside `named`.
constexpr verdict only_moves(const layout& from, const layout& to, const axis_list& named) {
  for (axis_id axis : differing_axes(from, to))
    if (!named.contains(axis))
      return {layout_error::move_not_named, axis, from.sharded_by(axis) ? from.sharded_by(axis) : to.sharded_by(axis),
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

/// Checks the order of dims: input = batch, rest, contracted; weight = batch, own, contracted; output = batch, rest,
/// own. The weight of a single linear may also be batch, contracted, own; this sets `inputs_first`.
constexpr verdict check_dims_of_linear(const layout& input, const layout& weight, const layout& output, bool alone,
                                       bool& inputs_first) {
  dim_list batched, rest, summed, own;
  for (dim_id dim : input.dim_order())
    (contracted(input, weight, output, dim) ? summed : weight.has(dim) ? batched : rest).push_back(dim);
  for (dim_id dim : weight.dim_order())
    if (!input.has(dim)) own.push_back(dim);
  const auto joined = [](std::initializer_list<const dim_list*> parts) {
    dim_list all;
    for (const dim_list* part : parts)
      for (dim_id dim : *part) all.push_back(dim);
    return all;
  };
  if (summed.empty() && !rest.empty()) {  // the weight must contract a dim: expects the input's last dim in place of
                                          // the weight's last own dim
    if (!own.empty()) own.pop_back();
    own.push_back(rest.back());
    return compare_dims(operand::weight, joined({&batched, &own}), weight.dim_order());
  }
  verdict v = compare_dims(operand::input, joined({&batched, &rest, &summed}), input.dim_order());
  inputs_first = alone && !own.empty() && weight.dim_order() == joined({&batched, &summed, &own});
  if (v.ok() && !inputs_first) v = compare_dims(operand::weight, joined({&batched, &own, &summed}), weight.dim_order());
  if (v.ok()) v = compare_dims(operand::output, joined({&batched, &rest, &own}), output.dim_order());
  return v;
}

/// Whether the outputs of several linears can be redistributed as one, side by side. Each product may differ from its
/// output only in leading dims and in the states of axes that shard no own dim of a weight.
constexpr verdict resolves_side_by_side(const layout& input, const layout& product, const layout& output) {
  for (axis_id axis : differing_axes(product, output))
    for (const layout* a : {&product, &output})
      if (const dim_id dim = a->sharded_by(axis); dim && !input.has(dim))
        return {layout_error::move_not_named, axis, dim, product.state_of(axis), output.state_of(axis)};
  return {};
}

}  // namespace detail

/// Derives linears y_i = x W_i' (+ b_i) that share their input x. `weights[i]` has the output's own dims, then the
/// contracted ones; a single linear may have the reverse order. `outputs[i]` has the input's remaining dims, then the
/// weight's own. Leading dims of all three are batches of products, which only a single linear may have. The input is
/// gathered once for all linears, and their partial gradients are summed before one reduction. Implicit moves happen
/// only on axes that shard a weight.
template <std::size_t N>
constexpr linear_derivation<N> derive_linear(const layout& input, const std::array<layout, N>& weights,
                                             const std::array<layout, N>& outputs) {
  linear_derivation<N> d;
  d.input = d.gathered = input;
  axis_list named;
  for (axis_id axis : input.partial)
    d.verdict.worsen({layout_error::unresolved_partial, axis, {}, state::partial, state::partial});
  for (std::size_t i = 0; i < N; ++i) {
    named = union_of(named, detail::sharding_axes(weights[i]));
    detail::gather_for(d.gathered, input, weights[i], outputs[i], d.verdict);
  }
  d.verdict.worsen(detail::only_moves(input, d.gathered, named));
  for (std::size_t i = 0; i < N; ++i) {
    linear_layouts& b = d.branches[i];
    b.placed = weights[i];
    b.weight = use_of(weights[i], d.gathered);
    b.output = outputs[i];
    if (const verdict v = detail::check_dims_of_linear(input, weights[i], outputs[i], N == 1, b.inputs_first);
        !v.ok()) {
      d.verdict.worsen(v);
      continue;
    }
    const derived_layout product = contract(d.gathered, b.weight, outputs[i].dim_order());
    d.verdict.worsen(product.verdict);
    b.product = product.result;
    if (d.verdict.ok()) d.verdict.worsen(detail::only_moves(b.product, b.output, detail::sharding_axes(weights[i])));
    if (N > 1 && d.verdict.ok()) d.verdict.worsen(detail::resolves_side_by_side(input, b.product, b.output));
    for (const dim_placement& p : outputs[i].dims)
      if (!input.has(p.dim) || weights[i].has(p.dim)) b.bias_placed.dims.push_back(p);
    b.bias = use_of(b.bias_placed, b.output);
  }
  return d;
}

/// The verdict on a bias, which is added to the output after its reduction. An output that is still partial cannot have
/// one.
constexpr verdict check_bias(const linear_layouts& b) { return pointwise(combine::sum, {&b.output, &b.bias}).verdict; }

}  // namespace plait
