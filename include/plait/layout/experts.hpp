// The typing rules of mixtures of experts: the choice of experts, the rows that experts receive, and the weighted sum
// that returns to the tokens. The experts' matrix products are a `contract` with `experts` as a batch dim.
#pragma once

#include "plait/layout/errors.hpp"
#include "plait/layout/rules.hpp"

namespace plait {

/// The dims of a mixture of experts. All dims of a choice except `chosen` are dims of tokens.
struct expert_dims {
  dim_id experts;  ///< the experts
  dim_id slot;     ///< the rows of one expert, in any order; experts have different numbers of rows
  dim_id chosen;   ///< the experts of one token
};

namespace detail {

/// The axes that shard tokens, in the order of the choice's dims.
constexpr axis_list token_axes(const layout& choice, const expert_dims& dims) {
  axis_list axes;
  for (const dim_placement& p : choice.dims)
    if (!(p.dim == dims.chosen)) axes = union_of(axes, p.axes);
  return axes;
}

}  // namespace detail

/// The layout of a choice of experts (its indices and its weights): `scores` [tokens.., experts] give [tokens..,
/// chosen]. Every rank needs complete scores of all experts for its tokens.
constexpr derived_layout choose_experts(const layout& scores, const expert_dims& dims) {
  derived_layout r = reduce_nonlinear(scores, dims.experts);
  r.result.dims.push_back({dims.chosen, {}});
  return r;
}

/// The layout of the rows [experts, slot, ..] that experts receive from `x` [tokens.., ..] by `choice` [tokens..,
/// chosen]. Dims of `x` that are not dims of tokens stay. Each rank makes the rows of its own tokens, so all axes that
/// shard tokens shard `slot`. The axes `last` come last among them, so a redistribution can then move them to
/// `experts`. Linear in `x`.
constexpr derived_layout dispatch_rows(const layout& x, const layout& choice, const expert_dims& dims,
                                       const axis_list& last = {}) {
  derived_layout r;
  const axis_list over = detail::token_axes(choice, dims);
  axis_list slots;
  for (axis_id axis : over)
    if (!last.contains(axis)) slots.push_back(axis);
  for (axis_id axis : last)
    if (over.contains(axis)) slots.push_back(axis);
  r.result.dims.push_back({dims.experts, {}});
  r.result.dims.push_back({dims.slot, slots});
  for (const dim_placement& p : x.dims)
    if (!choice.has(p.dim)) r.result.dims.push_back(p);
  for (const dim_placement& p : choice.dims)
    if (!(p.dim == dims.chosen) && !x.has(p.dim)) r.verdict.worsen({layout_error::dims_differ, {}, p.dim});
  r.verdict.worsen(detail::same_parts(x, choice));
  for (axis_id axis : detail::axes_of({&x, &choice})) {
    const state s = x.state_of(axis);
    const dim_id of_x = x.sharded_by(axis), of_choice = choice.sharded_by(axis);
    if (of_x && of_choice && !(of_x == of_choice))
      r.verdict.worsen({layout_error::one_axis_two_dims, axis, of_choice, s, state::varying});
    else
      r.verdict.worsen(detail::index_operand(choice, axis, choice.has(of_x) ? of_x : dim_id{}, s));
    detail::settle(r.result, axis, s);
  }
  return r;
}

/// The layout of each token's sum over its experts [tokens.., ..]: `rows` [experts, slot, ..] times `weights`
/// [tokens.., chosen]. The rows must be back on the ranks of their tokens. The sum is linear in rows and in weights. It
/// is partial over axes that shard experts; the weights must be replicated there, as for any pending sum.
constexpr derived_layout combine_rows(const layout& rows, const layout& weights, const expert_dims& dims) {
  const int at = rows.find(dims.slot);
  if (at < 0 || !rows.has(dims.experts))
    return {rows, {layout_error::dims_differ, {}, at < 0 ? dims.slot : dims.experts}};
  layout of_tokens = weights, back = rows;
  const int chosen = weights.find(dims.chosen);
  if (chosen >= 0) of_tokens.dims.erase(static_cast<std::size_t>(chosen));
  const axis_list made = rows.axes_of(dims.slot), over = detail::token_axes(weights, dims);
  back.dims.erase(static_cast<std::size_t>(at));
  dim_list out = of_tokens.dim_order();
  for (const dim_placement& p : back.dims)
    if (!(p.dim == dims.experts)) out.push_back(p.dim);
  verdict elsewhere;
  for (axis_id axis : union_of(made, over))
    if (made.contains(axis) != over.contains(axis))
      elsewhere.worsen(
          {layout_error::rows_of_other_tokens, axis, dims.slot, rows.state_of(axis), weights.state_of(axis)});
  for (const dim_placement& p : of_tokens.dims) {  // `elsewhere` refuses an axis that shards two dims
    back.dims.push_back({p.dim, elsewhere.ok() ? p.axes : axis_list{}});
  }
  if (!elsewhere.ok()) of_tokens = back;
  derived_layout r = contract(back, of_tokens, out);
  if (!elsewhere.ok()) r.verdict = elsewhere;
  return r;
}

}  // namespace plait
