// The errors of layouts with their texts, used by compile errors and exceptions alike. A `verdict` is a rule's outcome:
// ok, or an error with its axis, dim and states. layout/check.hpp raises errors; tests/fail shows their messages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"
#include "plait/layout/layout.hpp"

namespace plait {

/// Every error of a layout, least severe first. If several axes are wrong, the most severe error is reported.
enum class layout_error : std::uint8_t {
  ok,
  layers_do_not_fit,
  input_does_not_fit,
  output_not_derived,
  branch_ends_elsewhere,
  move_not_named,
  too_few_elements,
  sharded_and_whole,
  axis_order_differs,
  one_axis_two_dims,
  contraction_sharded,
  seq_must_be_whole,
  rows_of_other_tokens,
  context_axes_differ,
  context_axis_shards_heads,
  head_dim_must_be_whole,
  kv_heads_must_lead,
  meets_invariant,
  partial_plus_other,
  partial_times_varying,
  partial_times_partial,
  partial_nonlinear,
  unresolved_partial,
  reduced_over_shard,
  dims_differ,
  wrong_dual,
  axis_unmentioned,
  axis_unknown,
};

template <>
inline constexpr const char* error_text<layout_error::ok> = "ok";

#define PLAIT_TEXT                                                                                           \
  "the output of a layer has another spec than the next layer's input: make their policies agree, or put a " \
  "redistribution between them"
PLAIT_ERROR(layout_error::layers_do_not_fit) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                                   \
  "the tensor given has another spec than the input of the layer, or of the first of several: put layers in order, " \
  "make the specs agree, or redistribute the tensor first"
PLAIT_ERROR(layout_error::input_does_not_fit) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                               \
  "the output of a kernel has another spec than its rule derives from the operands: `states` shows the derived " \
  "state, then the output's"
PLAIT_ERROR(layout_error::output_not_derived) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT \
  "a residual branch must have equal input and output specs: norm, layer and the residual stream need one spec"
PLAIT_ERROR(layout_error::branch_ends_elsewhere) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                          \
  "this step would need a collective over an axis that the policy does not name: redistribute explicitly, " \
  "or let the two specs agree on that axis"
PLAIT_ERROR(layout_error::move_not_named) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a dim has fewer elements than there are ranks that shard it"
PLAIT_ERROR(layout_error::too_few_elements) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                         \
  "a dim is sharded over an axis in one operand and not in the other: the local sizes differ. Gather it, " \
  "or shard the other operand alike"
PLAIT_ERROR(layout_error::sharded_and_whole) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                           \
  "a dim is sharded over the same axes in a different order in two operands: the local parts are different " \
  "rows"
PLAIT_ERROR(layout_error::axis_order_differs) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                    \
  "one axis shards different dims of two operands: each rank would combine parts that do not belong " \
  "together"
PLAIT_ERROR(layout_error::one_axis_two_dims) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                          \
  "the dim that a linear contracts is sharded in its input but not in its weight: gather the input first, " \
  "or shard the weight's contracted dim over the same axes (row-parallel)"
PLAIT_ERROR(layout_error::contraction_sharded) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                      \
  "attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel " \
  "policy"
PLAIT_ERROR(layout_error::seq_must_be_whole) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                                     \
  "the rows of experts are not on the ranks of their tokens: `slot` must be sharded over exactly the axes that shard " \
  "tokens. Redistribute the rows first"
PLAIT_ERROR(layout_error::rows_of_other_tokens) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                     \
  "attention needs the sequence sharded over exactly the axes of its context-parallel policy, in its " \
  "order: let the residual shard its sequence over them first, or choose another policy"
PLAIT_ERROR(layout_error::context_axes_differ) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                                   \
  "an axis of context-parallel attention shards the heads too: a policy such as ring<cp> needs an axis of its own, " \
  "which shards the sequence and no heads"
PLAIT_ERROR(layout_error::context_axis_shards_heads) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                         \
  "attention needs whole heads on the rank: the dim that its scores sum over is sharded. Shard the heads " \
  "instead"
PLAIT_ERROR(layout_error::head_dim_must_be_whole) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                           \
  "the axes of kv_heads must be the leading axes of heads: shard<heads, a, b> goes with shard<kv_heads, a, " \
  "b> or shard<kv_heads, a>"
PLAIT_ERROR(layout_error::kv_heads_must_lead) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                        \
  "an invariant value mixes with nothing but invariant values: its gradient would miss the other ranks' " \
  "terms. Use it as replicate<axis> (no communication now, one reduction of its gradient)"
PLAIT_ERROR(layout_error::meets_invariant) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                          \
  "a sum of a partial value and one that is not partial would count the latter once per rank: resolve the " \
  "pending sum first, then add"
PLAIT_ERROR(layout_error::partial_plus_other) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                         \
  "a product of a partial and a sharded value mixes terms of one rank with the shard of another: resolve " \
  "the pending sum first"
PLAIT_ERROR(layout_error::partial_times_varying) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                     \
  "the product of two partial values is not partial: the sum of products is not the product of sums. " \
  "Resolve one of the pending sums first"
PLAIT_ERROR(layout_error::partial_times_partial) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT \
  "a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first"
PLAIT_ERROR(layout_error::partial_nonlinear) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a forgotten reduction: the value is still partial over an axis on which it has to be complete"
PLAIT_ERROR(layout_error::unresolved_partial) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT \
  "a nonlinear reduction over a dim that is sharded: each rank sees only its part. Gather the dim first"
PLAIT_ERROR(layout_error::reduced_over_shard) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "the dims are not the ones expected here, in this order"
PLAIT_ERROR(layout_error::dims_differ) {
  static_assert(always_false<Facts...>,
                PLAIT_TEXT ": `expected_dims` of this message were expected, and `given_dims` were given");
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                           \
  "a gradient with the wrong spec: the gradient of a value has the dual spec (replicate and partial change " \
  "places)"
PLAIT_ERROR(layout_error::wrong_dual) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                       \
  "a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, " \
  "partial<axis> or invariant<axis>"
PLAIT_ERROR(layout_error::axis_unmentioned) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

#define PLAIT_TEXT "a spec names an axis that the mesh does not have"
PLAIT_ERROR(layout_error::axis_unknown) { static_assert(always_false<Facts...>, PLAIT_TEXT); };
#undef PLAIT_TEXT

/// The text of an error, equal to its `static_assert`.
constexpr const char* text_of(layout_error e) {
  return detail::text_among<layout_error, layout_error::layers_do_not_fit, layout_error::axis_unknown>(e);
}

/// The tensor that a verdict concerns, if a single tensor is wrong.
enum class operand : std::uint8_t {
  none,
  input,
  weight,
  output,
  gradient,
  labels,
  residual,
  heads,
  kv_heads,
  feed_forward,
  vocabulary,
};

constexpr const char* name_of(operand o) {
  constexpr const char* names[] = {"",         "input", "weight",   "output",       "gradient",  "labels",
                                   "residual", "heads", "kv_heads", "feed_forward", "vocabulary"};
  return names[static_cast<std::size_t>(o)];
}

/// The outcome of a rule with its facts: the offending axis and dim, and the states of two operands there. If dims
/// differ: the tensor, its expected dims and its given dims.
struct verdict {
  layout_error code = layout_error::ok;
  axis_id axis;
  dim_id dim;
  state first = state::invariant;
  state second = state::invariant;
  operand of = operand::none;
  dim_list expected = {};
  dim_list given = {};

  constexpr bool ok() const { return code == layout_error::ok; }
  /// Keeps the more severe of two outcomes.
  constexpr void worsen(const verdict& other) {
    if (other.code > code) *this = other;
  }
};

/// The verdict on the dims of the tensor `of`: ok, or the first position where expected and given dims differ.
constexpr verdict compare_dims(operand of, const dim_list& expected, const dim_list& given) {
  if (expected == given) return {};
  std::size_t i = 0;
  while (i < expected.size() && i < given.size() && expected[i] == given[i]) ++i;
  verdict v{layout_error::dims_differ, {}, i < expected.size() ? expected[i] : given[i]};
  v.of = of;
  v.expected = expected;
  v.given = given;
  return v;
}

/// Checks that every rank has elements, or a whole block, of every dim. A sharded dim without a size counts as empty.
constexpr verdict check_parts(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes) {
  for (const dim_placement& p : a.dims)
    if (sizes.of(p.dim) % sizes.block_of(p.dim) != 0 || sizes.of(p.dim) / sizes.block_of(p.dim) < mesh.size(p.axes))
      return {layout_error::too_few_elements, p.axes.empty() ? axis_id{} : p.axes[0], p.dim, state::varying,
              state::varying};
  return {};
}

/// A rule's result. `result` is usable after an error too, so one mistake does not cause many errors.
struct derived_layout {
  layout result;
  plait::verdict verdict;
};

}  // namespace plait
