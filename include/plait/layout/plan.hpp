// The steps of a redistribution, the sixteen transitions, and the mirror of a plan, which is its backward. Plans are
// made by layout/make_plan.hpp and run by tensor/executor.hpp; that mirrors are adjoint,
// tests/unit/layout/plan_adjoint.cpp.
#pragma once

#include "plait/layout/verdict.hpp"

namespace plait {

/// One step of a redistribution. `keep_one` leaves the value on the group's first rank and zeros elsewhere; `pad` puts
/// the local part among zeros; `relabel` moves nothing: only the meaning of the value changes.
enum class transition_kind : std::uint8_t {
  slice,
  pad,
  keep_one,
  relabel,
  all_reduce,
  all_gather,
  reduce_scatter,
  all_to_all
};

constexpr const char* name_of(transition_kind m) {
  switch (m) {
    case transition_kind::slice:
      return "slice";
    case transition_kind::pad:
      return "pad";
    case transition_kind::keep_one:
      return "keep_one";
    case transition_kind::relabel:
      return "relabel";
    case transition_kind::all_reduce:
      return "all_reduce";
    case transition_kind::all_gather:
      return "all_gather";
    case transition_kind::reduce_scatter:
      return "reduce_scatter";
    case transition_kind::all_to_all:
      return "all_to_all";
  }
  return "?";
}
constexpr bool communicates(transition_kind m) { return m >= transition_kind::all_reduce; }

struct redistribution_step {
  transition_kind kind = transition_kind::relabel;
  axis_list axes;  ///< the group, major first; for moves of a dim in the order in which the axes shard it
  dim_id dim;      ///< the dim that is sliced, gathered, scattered or padded; none for the other moves
  state from = state::invariant, to = state::invariant;  ///< of every axis in `axes`
  layout after;
};

/// How to get from one layout to another of the same dims: an empty list of steps where they are equivalent.
struct plan {
  layout from, to;
  static_vector<redistribution_step, 12> steps;
  plait::verdict verdict;

  constexpr const layout& before(std::size_t i) const { return i == 0 ? from : steps[i - 1].after; }
  /// The axes that some step communicates over.
  constexpr axis_list communicating_axes() const {
    axis_list axes;
    for (const redistribution_step& s : steps)
      if (communicates(s.kind)) axes = union_of(axes, s.axes);
    return axes;
  }
};

/// The one move from `from` to `to` on an axis, for a value that changes on that axis only: the sixteen transitions.
constexpr transition_kind transition(state from, state to) {
  using enum state;
  switch (from) {
    case invariant:
      return to == varying   ? transition_kind::slice
             : to == partial ? transition_kind::keep_one
                             : transition_kind::relabel;
    case replicated:
      return to == varying   ? transition_kind::slice
             : to == partial ? transition_kind::keep_one
                             : transition_kind::relabel;
    case varying:
      return to == varying   ? transition_kind::all_to_all
             : to == partial ? transition_kind::pad
                             : transition_kind::all_gather;
    case partial:
      return to == varying   ? transition_kind::reduce_scatter
             : to == partial ? transition_kind::relabel
                             : transition_kind::all_reduce;
  }
  return transition_kind::relabel;
}

/// The adjoint of one step: from the dual of what it made to the dual of what it took.
constexpr redistribution_step mirror(const redistribution_step& s, const layout& before) {
  redistribution_step back = s;
  back.from = dual(s.to);
  back.to = dual(s.from);
  back.kind = transition(back.from, back.to);
  back.after = dual(before);
  return back;
}

/// The backward plan: the mirror of the forward steps, in reverse. It is the exact adjoint, and it is not planned anew.
constexpr plan mirror(const plan& forward) {
  plan back;
  back.from = dual(forward.to);
  back.to = dual(forward.from);
  back.verdict = forward.verdict;
  for (std::size_t i = forward.steps.size(); i-- > 0;)
    back.steps.push_back(mirror(forward.steps[i], forward.before(i)));
  return back;
}

/// The axes on which a rank's local data or its meaning differs between two layouts of the same dims. An axis counts
/// when its state or dim changes, or when the axes outside it on its dim do.
constexpr axis_list differing_axes(const layout& a, const layout& b) {
  axis_list axes;
  for (axis_id axis : union_of(a.mentioned(), b.mentioned())) {
    bool same = a.state_of(axis) == b.state_of(axis) && a.sharded_by(axis) == b.sharded_by(axis);
    if (const dim_id dim = a.sharded_by(axis); same && dim) {
      const axis_list x = a.axes_of(dim), y = b.axes_of(dim);
      for (std::size_t i = 0; same && !(x[i] == axis); ++i) same = i < y.size() && x[i] == y[i];
      same = same && y[static_cast<std::size_t>(x.find(axis))] == axis;
    }
    if (!same) axes.push_back(axis);
  }
  return axes;
}

}  // namespace plait
