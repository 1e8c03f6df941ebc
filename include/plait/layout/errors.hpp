// The errors of layouts and the text of each, for compilers and exceptions alike. The conditions are elsewhere: most
// in layout/rules.hpp. How an error is raised: core/error.hpp, layout/enforce.hpp; messages: tests/fail.
#pragma once

#include <cstddef>
#include <cstdint>

#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"

namespace plait {

/// Every way in which a layout can be refused, in order of severity: where several axes offend, the last of these is
/// the one reported.
enum class layout_error : std::uint8_t {
  ok,
  layers_do_not_fit,
  input_does_not_fit,
  branch_ends_elsewhere,
  move_not_named,
  does_not_divide,
  sharded_and_whole,
  axis_order_differs,
  one_axis_two_dims,
  contraction_sharded,
  seq_must_be_whole,
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

#define PLAIT_TEXT                                                                                   \
  "the output of a layer does not lie as the next one takes it: let their policies agree, or put a " \
  "redistribution between them"
template <>
inline constexpr const char* error_text<layout_error::layers_do_not_fit> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::layers_do_not_fit, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                                    \
  "the tensor given does not lie as the layer, or the first of several, takes its input: put layers in their order, " \
  "let the specs agree, or redistribute the tensor first"
template <>
inline constexpr const char* error_text<layout_error::input_does_not_fit> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::input_does_not_fit, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a residual branch must end as it began: norm, layer and the residual stream need one spec"
template <>
inline constexpr const char* error_text<layout_error::branch_ends_elsewhere> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::branch_ends_elsewhere, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                          \
  "this step would need a collective over an axis that the policy does not name: redistribute explicitly, " \
  "or let the two specs agree on that axis"
template <>
inline constexpr const char* error_text<layout_error::move_not_named> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::move_not_named, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "the global size of a dim is not divisible by the number of ranks that shard it"
template <>
inline constexpr const char* error_text<layout_error::does_not_divide> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::does_not_divide, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                         \
  "a dim is sharded over an axis in one operand and not in the other: the local sizes differ. Gather it, " \
  "or shard the other operand alike"
template <>
inline constexpr const char* error_text<layout_error::sharded_and_whole> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::sharded_and_whole, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                           \
  "a dim is sharded over the same axes in a different order in two operands: the local parts are different " \
  "rows"
template <>
inline constexpr const char* error_text<layout_error::axis_order_differs> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::axis_order_differs, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                    \
  "one axis shards different dims of two operands: each rank would combine parts that do not belong " \
  "together"
template <>
inline constexpr const char* error_text<layout_error::one_axis_two_dims> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::one_axis_two_dims, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                          \
  "the dim that a linear contracts is sharded in its input but not in its weight: gather the input first, " \
  "or shard the weight's contracted dim over the same axes (row-parallel)"
template <>
inline constexpr const char* error_text<layout_error::contraction_sharded> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::contraction_sharded, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                      \
  "attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel " \
  "policy"
template <>
inline constexpr const char* error_text<layout_error::seq_must_be_whole> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::seq_must_be_whole, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                     \
  "attention needs the sequence sharded over exactly the axes of its context-parallel policy, in its " \
  "order: let the residual shard its sequence over them first, or choose another policy"
template <>
inline constexpr const char* error_text<layout_error::context_axes_differ> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::context_axes_differ, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                                   \
  "an axis of context-parallel attention shards the heads too: a policy such as ring<cp> needs an axis of its own, " \
  "which shards the sequence and no heads"
template <>
inline constexpr const char* error_text<layout_error::context_axis_shards_heads> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::context_axis_shards_heads, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                         \
  "attention needs whole heads on the rank: the dim that its scores sum over is sharded. Shard the heads " \
  "instead"
template <>
inline constexpr const char* error_text<layout_error::head_dim_must_be_whole> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::head_dim_must_be_whole, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                           \
  "the axes of kv_heads must be the leading axes of heads: shard<heads, a, b> goes with shard<kv_heads, a, " \
  "b> or shard<kv_heads, a>"
template <>
inline constexpr const char* error_text<layout_error::kv_heads_must_lead> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::kv_heads_must_lead, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                        \
  "an invariant value mixes with nothing but invariant values: its gradient would miss the other ranks' " \
  "terms. Use it as replicate<axis> (no communication now, one reduction of its gradient)"
template <>
inline constexpr const char* error_text<layout_error::meets_invariant> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::meets_invariant, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                          \
  "a sum of a partial value and one that is not partial would count the latter once per rank: resolve the " \
  "pending sum first, then add"
template <>
inline constexpr const char* error_text<layout_error::partial_plus_other> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::partial_plus_other, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                         \
  "a product of a partial and a sharded value mixes terms of one rank with the shard of another: resolve " \
  "the pending sum first"
template <>
inline constexpr const char* error_text<layout_error::partial_times_varying> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::partial_times_varying, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                     \
  "the product of two partial values is not partial: the sum of products is not the product of sums. " \
  "Resolve one of the pending sums first"
template <>
inline constexpr const char* error_text<layout_error::partial_times_partial> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::partial_times_partial, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT \
  "a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first"
template <>
inline constexpr const char* error_text<layout_error::partial_nonlinear> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::partial_nonlinear, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a forgotten reduction: the value is still partial over an axis on which it has to be complete"
template <>
inline constexpr const char* error_text<layout_error::unresolved_partial> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::unresolved_partial, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT \
  "a nonlinear reduction over a dim that is sharded: each rank sees only its part. Gather the dim first"
template <>
inline constexpr const char* error_text<layout_error::reduced_over_shard> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::reduced_over_shard, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "the dims are not the ones expected here, in this order"
template <>
inline constexpr const char* error_text<layout_error::dims_differ> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::dims_differ, Facts...> {
  static_assert(always_false<Facts...>,
                PLAIT_TEXT ": `given_dims` of this message came where `expected_dims` of it belong");
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                           \
  "a gradient with the wrong spec: the gradient of a value has the dual spec (replicate and partial change " \
  "places)"
template <>
inline constexpr const char* error_text<layout_error::wrong_dual> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::wrong_dual, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT                                                                                       \
  "a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, " \
  "partial<axis> or invariant<axis>"
template <>
inline constexpr const char* error_text<layout_error::axis_unmentioned> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::axis_unmentioned, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

#define PLAIT_TEXT "a spec names an axis that the mesh does not have"
template <>
inline constexpr const char* error_text<layout_error::axis_unknown> = PLAIT_TEXT;
template <class... Facts>
struct refused<layout_error::axis_unknown, Facts...> {
  static_assert(always_false<Facts...>, PLAIT_TEXT);
};
#undef PLAIT_TEXT

/// The text of an error, as the `static_assert` has it.
constexpr const char* text_of(layout_error e) {
  return detail::text_among<layout_error, layout_error::layers_do_not_fit, layout_error::axis_unknown>(e);
}

}  // namespace plait
