// Plans the redistribution from one layout to another.
#pragma once

#include "plait/layout/plan.hpp"
#include "plait/layout/plan_search.hpp"

namespace plait {
namespace detail {

/// Plans in which every axis makes the same transition need no search: one move for each dim, or one in all. True if
/// `result` is planned.
constexpr bool plan_alike(plan& result, const axis_list& moving) {
  const state s = result.from.state_of(moving[0]), t = result.to.state_of(moving[0]);
  for (axis_id axis : moving)
    if (result.from.state_of(axis) != s || result.to.state_of(axis) != t) return false;
  if (s == state::varying && t == state::varying) {
    result.steps.push_back({transition_kind::all_to_all, moving, {}, s, t, result.to});
    return true;
  }
  layout current = result.from;
  if (s != state::varying && t != state::varying) {
    for (axis_id axis : moving) current.set(axis, t);
    result.steps.push_back({transition(s, t), moving, {}, s, t, current});
    return true;
  }
  for (const dim_placement& p : (s == state::varying ? result.from : result.to).dims) {
    axis_list axes;
    for (axis_id axis : p.axes)
      if (moving.contains(axis)) axes.push_back(axis);
    if (axes.empty()) continue;
    for (axis_id axis : axes) {
      if (t == state::varying) {
        current.append(p.dim, axis);
      } else {
        axis_list& there = current.dims[static_cast<std::size_t>(current.find(p.dim))].axes;
        there.erase(static_cast<std::size_t>(there.find(axis)));
        current.set(axis, t);
      }
    }
    result.steps.push_back({transition(s, t), axes, p.dim, s, t, current});
  }
  return true;
}

}  // namespace detail

/// The plan of least wire bytes, forward and backward together, from one layout to another of the same dims in the same
/// order, among those that `allowed` admits. Extents decide between plans where it matters: those that are `dynamic` or
/// unknown count as 2. No step on the way cuts a dim of known size into parts that do not divide; whether the ends
/// divide is for `check_divides` to say. The verdict is `dims_differ` for other dims, and `does_not_divide` if no way
/// is left.
constexpr plan make_plan(const layout& from, const layout& to, const mesh_shape& mesh = {}, const dim_sizes& sizes = {},
                         detours allowed = detours::none) {
  plan result;
  result.from = from;
  result.to = to;
  if (!(from.dim_order() == to.dim_order())) {
    result.verdict = compare_dims(operand::output, from.dim_order(), to.dim_order());
    return result;
  }
  axis_list moving = differing_axes(from, to);
  if (moving.empty()) return result;
  if (allowed == detours::any) moving = union_of(from.mentioned(), to.mentioned());
  if (allowed == detours::any || !detail::plan_alike(result, moving)) {
    detail::plan_search search(from, to, moving, mesh, sizes, allowed);
    search.run(result);
  }
  if (!result.steps.empty()) result.steps.back().after = to;
  return result;
}

}  // namespace plait
