// Refuses to compile a boundary whose spec forgets an axis of its mesh. The rule is `check_boundary` in
// layout/rules.hpp; a mesh that is known at run time only is checked by tensor/boundary_check.hpp.
#pragma once

#include "plait/layout/enforce.hpp"
#include "plait/layout/rules.hpp"

namespace plait {

namespace detail {

template <class Spec, class Mesh>
struct boundary_verdict {
  static constexpr verdict value = check_boundary(layout_v<Spec>, Mesh::static_shape());
};
template <class Mesh>
struct mesh_tags {
  using dims = type_list<>;
  using axes = typename Mesh::tags;
};

}  // namespace detail

/// Refuses to compile unless `Spec` mentions every axis of `Mesh` and no other. `Where` is the policy or layer whose
/// boundary this is; the message names it. Otherwise true.
template <spec_like Spec, mesh_like Mesh, class Where>
inline constexpr bool boundary =

    sizeof(detail::later_consequence<detail::boundary_verdict<Spec, Mesh>, Where, Spec, detail::mesh_tags<Mesh>>) > 0;

}  // namespace plait
