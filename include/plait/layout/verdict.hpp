#pragma once

#include <cstdint>

#include "plait/layout/layout.hpp"

/// Every way in which a layout can be refused: a code, and the text that the `static_assert` and the exception share.
/// In order of severity: where several axes offend, the last of these codes is the one reported.
#define PLAIT_LAYOUT_ERRORS(X)                                                                                         \
  X(move_not_named,                                                                                                    \
    "this step would need a collective over an axis that the policy does not name: redistribute explicitly, or let "   \
    "the "                                                                                                             \
    "two specs agree on that axis")                                                                                    \
  X(does_not_divide, "the global size of a dim is not divisible by the number of ranks that shard it")                 \
  X(sharded_and_whole,                                                                                                 \
    "a dim is sharded over an axis in one operand and not in the other: the local sizes differ. Gather it, or shard "  \
    "the other operand alike")                                                                                         \
  X(axis_order_differs,                                                                                                \
    "a dim is sharded over the same axes in a different order in two operands: the local parts are different rows")    \
  X(one_axis_two_dims,                                                                                                 \
    "one axis shards different dims of two operands: each rank would combine parts that do not belong together")       \
  X(contraction_sharded,                                                                                               \
    "the dim that a linear contracts is sharded in its input but not in its weight: gather the input first, or shard " \
    "the weight's contracted dim over the same axes (row-parallel)")                                                   \
  X(seq_must_be_whole,                                                                                                 \
    "attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel policy")       \
  X(context_axes_differ,                                                                                               \
    "attention needs the sequence sharded over exactly the axes of its context-parallel policy, in its order: let "    \
    "the "                                                                                                             \
    "residual shard its sequence over them first, or choose another policy")                                           \
  X(head_dim_must_be_whole,                                                                                            \
    "attention needs whole heads on the rank: the dim that its scores sum over is sharded. Shard the heads instead")   \
  X(kv_heads_must_lead,                                                                                                \
    "the axes of kv_heads must be the leading axes of heads: shard<heads, a, b> goes with shard<kv_heads, a, b> or "   \
    "shard<kv_heads, a>")                                                                                              \
  X(meets_invariant,                                                                                                   \
    "an invariant value mixes with nothing but invariant values: its gradient would miss the other ranks' terms. Use " \
    "it as replicate<axis> (no communication now, one reduction of its gradient)")                                     \
  X(partial_plus_other,                                                                                                \
    "a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending "  \
    "sum first, then add")                                                                                             \
  X(partial_times_varying,                                                                                             \
    "a product of a partial and a sharded value mixes terms of one rank with the shard of another: resolve the "       \
    "pending "                                                                                                         \
    "sum first")                                                                                                       \
  X(partial_times_partial,                                                                                             \
    "the product of two partial values is not partial: the sum of products is not the product of sums. Resolve one "   \
    "of "                                                                                                              \
    "the pending sums first")                                                                                          \
  X(partial_nonlinear,                                                                                                 \
    "a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first")        \
  X(unresolved_partial,                                                                                                \
    "a forgotten reduction: the value is still partial over an axis on which it has to be complete")                   \
  X(reduced_over_shard,                                                                                                \
    "a nonlinear reduction over a dim that is sharded: each rank sees only its part. Gather the dim first")            \
  X(dims_differ, "the dims are not the ones expected here, in this order")                                             \
  X(wrong_dual,                                                                                                        \
    "a gradient with the wrong spec: the gradient of a value has the dual spec (replicate and partial change places)") \
  X(axis_unmentioned,                                                                                                  \
    "a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, "             \
    "partial<axis> "                                                                                                   \
    "or invariant<axis>")                                                                                              \
  X(axis_unknown, "a spec names an axis that the mesh does not have")

namespace plait {

/// What a rule says of its operands.
enum class rule : std::uint8_t {
  ok,
#define PLAIT_CODE(code, text) code,
  PLAIT_LAYOUT_ERRORS(PLAIT_CODE)
#undef PLAIT_CODE
};

constexpr const char* text_of(rule r) {
  switch (r) {
#define PLAIT_TEXT(code, text) \
  case rule::code:             \
    return text;
    PLAIT_LAYOUT_ERRORS(PLAIT_TEXT)
#undef PLAIT_TEXT
    case rule::ok:
      break;
  }
  return "ok";
}

/// The outcome of a rule with its facts: the offending axis and dim, and the states of two operands there.
struct verdict {
  rule code = rule::ok;
  axis_id axis;
  dim_id dim;
  state first = state::invariant;
  state second = state::invariant;

  constexpr bool ok() const { return code == rule::ok; }
  /// Keeps the more severe of two outcomes.
  constexpr void worsen(const verdict& other) {
    if (other.code > code) *this = other;
  }
};

/// A rule's result. `result` is meaningful also after an error, so that one mistake does not become many.
struct ruled {
  layout result;
  plait::verdict verdict;
};

}  // namespace plait
