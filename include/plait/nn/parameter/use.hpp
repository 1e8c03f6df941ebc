// The rule by which the use of a parameter follows from its placement and its partner's layout, as constexpr functions.
#pragma once

#include <string>

#include "plait/core/error.hpp"
#include "plait/layout/describe.hpp"
#include "plait/layout/enforce.hpp"
#include "plait/layout/rules.hpp"

namespace plait {

/// How a parameter is used, given how its dims are placed and the layout of its partner: the input of a product, the
/// rows of a norm, the output that a bias is added to. It is replicated over every axis on which its partner varies or
/// is replicated, and which does not shard it. So its gradient is partial there, and the reduction follows. This rule
/// is the only source of a parameter's use.
constexpr layout use_of(layout placed, const layout& met) {
  for (axis_id axis : met.mentioned()) {
    if (placed.state_of(axis) != state::invariant) continue;
    const state s = met.state_of(axis);
    if (s != state::invariant) placed.set(axis, state::replicated);
  }
  return placed;
}

/// Parameters are stored sharded or invariant: one stored replicated would reach the optimizer with a gradient that is
/// still partial.
constexpr verdict check_stored(const layout& stored) {
  verdict v;
  for (axis_id axis : stored.replicated)
    v.worsen({layout_error::unresolved_partial, axis, {}, state::partial, state::replicated});
  for (axis_id axis : stored.partial)
    v.worsen({layout_error::unresolved_partial, axis, {}, state::replicated, state::partial});
  return v;
}

namespace detail {
/// `use_of` on a mesh; `met` has to mention every axis of it.
inline layout checked_use(const mesh_shape& mesh, const std::string& name, const layout& placed, const layout& met) {
  enforce(check_boundary(met, mesh), cat({"parameter ", name, ": what it meets, ", describe(met)}));
  return use_of(placed, met);
}

template <class Placed, class Met>
struct use_value {
  static constexpr layout value = use_of(layout_v<Placed>, layout_v<Met>);
};
}  // namespace detail

/// The use as a type: `use_t<spec<hidden>, residual>` is the spec of a norm's weight where it is used.
template <spec_like Placed, spec_like Met>
using use_t = spec_from<detail::use_value<Placed, Met>, Placed, Met>;

}  // namespace plait
