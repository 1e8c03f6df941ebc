// The result of a rule: ok, or an error of layout/errors.hpp with the axis, dim and states that it is about. A verdict
// is a value and stops nothing by itself: layout/enforce.hpp and layout/describe.hpp make errors of it.
#pragma once

#include <cstdint>

#include "plait/layout/errors.hpp"
#include "plait/layout/layout.hpp"

namespace plait {

/// Which tensor of an operation a verdict speaks of, where one is wrong by itself.
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
  switch (o) {
    case operand::none:
      return "";
    case operand::input:
      return "input";
    case operand::weight:
      return "weight";
    case operand::output:
      return "output";
    case operand::gradient:
      return "gradient";
    case operand::labels:
      return "labels";
    case operand::residual:
      return "residual";
    case operand::heads:
      return "heads";
    case operand::kv_heads:
      return "kv_heads";
    case operand::feed_forward:
      return "feed_forward";
    case operand::vocabulary:
      return "vocabulary";
  }
  return "?";
}

/// The outcome of a rule with its facts: the offending axis and dim, and the states of two operands there; where dims
/// differ, whose they are, and both lists.
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

/// The verdict on the dims of one tensor of an operation: ok, or the first place at which they differ.
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

/// A rule's result. `result` is meaningful also after an error, so that one mistake does not become many.
struct derived_layout {
  layout result;
  plait::verdict verdict;
};

}  // namespace plait
