// Checks of specs against the mesh of a context, when a program runs. For a mesh that the compiler knows, there is
// layout/boundary.hpp. Next: layout/rules.hpp for `check_boundary`, tests/unit/nn/boundary.cpp for the refusals.
#pragma once

#include <string>

#include "plait/layout/describe.hpp"
#include "plait/layout/local_box.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// Throws, with the text that the compiler has for a mesh it knows, unless `Spec` mentions every axis of the context's
/// mesh and no other. `where` names the layer and which of its boundaries this is. Layers call it when they are made.
template <spec_like Spec, compute_device Device>
void enforce_boundary(const context<Device>& ctx, const std::string& where) {
  enforce(check_boundary(layout_v<Spec>, ctx.ranks.shape()), where);
}

/// Returns the part of a tensor with this spec that the context's rank holds. Throws if the spec mentions an axis that
/// the mesh does not have. A tensor may leave axes unmentioned: only a boundary, where gradients change hands, must
/// not. Tensors are made in every step, so this is a few compares of addresses.
template <spec_like Spec, compute_device Device>
box part_of(const context<Device>& ctx) {
  static constexpr axis_list mentioned = layout_v<Spec>.mentioned();
  const mesh_shape& mesh = ctx.ranks.shape();
  for (axis_id axis : mentioned)
    if (!mesh.has(axis)) enforce(check_boundary(layout_v<Spec>, mesh), "tensor " + describe(layout_v<Spec>));
  return local_box(layout_v<Spec>, mesh, ctx.sizes, ctx.ranks.rank());
}

}  // namespace plait
