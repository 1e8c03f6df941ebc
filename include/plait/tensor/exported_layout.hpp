// The layout of a part that leaves plait: names and numbers, and the same as JSON text. No types of plait are in it, so
// it travels beside a pointer to another library, process or language.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plait/core/text.hpp"
#include "plait/io/json_writer.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/boundary_check.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// How one rank's part of a tensor lies in the whole tensor and on the mesh.
struct exported_layout {
  /// A dim in the order of the part's memory; sizes and the offset are in elements along it.
  struct dim {
    std::string name;
    std::int64_t global = 0, local = 0, offset = 0;
    std::vector<std::string> axes;  ///< which shard it, the first one major
  };
  /// An axis of the mesh, major first.
  struct axis {
    std::string name;
    std::int64_t extent = 1;      ///< ranks along it
    std::int64_t coordinate = 0;  ///< this rank's place along it
    std::string state;            ///< of the tensor along it: "varying", "partial", "replicated" or "invariant"
  };

  std::string spec;  ///< as errors write it: "<batch, shard<hidden, tp>>"
  std::vector<dim> dims;
  std::vector<axis> mesh;

  /// One object on one line: {"spec": ..., "dims": [{"name", "global", "local", "offset", "axes"}...], "mesh":
  /// [{"name", "extent", "coordinate", "state"}...]}.
  std::string json() const;

  /// Returns what differs in `other`, in words that name the dim or the axis; empty if they are one layout. Axes of one
  /// rank make no difference.
  std::string difference(const exported_layout& other) const;
};

/// The layout of this rank's part of a tensor with spec `Spec`. Throws if the spec mentions an axis that the context's
/// mesh does not have.
template <spec_like Spec, compute_device Device>
exported_layout export_layout(const context<Device>& ctx) {
  const box part = part_of<Spec>(ctx);
  const layout& how = layout_v<Spec>;
  const mesh_shape& mesh = ctx.ranks.shape();
  exported_layout out{describe(how), {}, {}};
  for (std::size_t d = 0; d < how.dims.size(); ++d) {
    out.dims.push_back({how.dims[d].dim.text(), part.global[d], part.local[d], part.offset[d], {}});
    for (const axis_id a : how.dims[d].axes) out.dims.back().axes.emplace_back(a.text());
  }
  for (const axis_id a : mesh.axes)
    out.mesh.push_back({a.text(), mesh.extent(a), mesh.coordinate(ctx.ranks.rank(), a), name_of(how.state_of(a))});
  return out;
}

inline std::string exported_layout::json() const {
  std::vector<json_object> dims_out(dims.size()), mesh_out(mesh.size());
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const dim& d = dims[i];
    dims_out[i].add("name", d.name).add("global", d.global).add("local", d.local).add("offset", d.offset);
    dims_out[i].add("axes", d.axes);
  }
  for (std::size_t i = 0; i < mesh.size(); ++i) {
    const axis& a = mesh[i];
    mesh_out[i].add("name", a.name).add("extent", a.extent).add("coordinate", a.coordinate).add("state", a.state);
  }
  return json_object().add("spec", spec).add("dims", dims_out).add("mesh", mesh_out).text();
}

namespace detail {

/// "2 dp * 4 tp", without axes of one rank.
inline std::string extents_of(const exported_layout& e) {
  std::string text;
  for (const exported_layout::axis& a : e.mesh)
    if (a.extent > 1) append(text, {text.empty() ? "" : " * ", a.extent, " ", a.name});
  return text.empty() ? "one rank" : text;
}
/// "tp, cp", of those that have several ranks.
inline std::string axes_of(const exported_layout& e, const exported_layout::dim& d) {
  std::string text;
  for (const std::string& name : d.axes)
    for (const exported_layout::axis& a : e.mesh)
      if (a.name == name && a.extent > 1) append(text, {text.empty() ? "" : ", ", name});
  return text.empty() ? "no axis" : text;
}
/// "<batch, hidden>".
inline std::string names_of(const std::vector<exported_layout::dim>& dims) {
  std::string text;
  for (const exported_layout::dim& d : dims) append(text, {text.empty() ? "" : ", ", d.name});
  return cat({"<", text, ">"});
}

}  // namespace detail

inline std::string exported_layout::difference(const exported_layout& other) const {
  if (detail::names_of(dims) != detail::names_of(other.dims))
    return cat({"the dims are ", detail::names_of(other.dims), ", not ", detail::names_of(dims)});
  if (detail::extents_of(*this) != detail::extents_of(other))
    return cat({"the mesh is ", detail::extents_of(other), ", not ", detail::extents_of(*this)});
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const dim &mine = dims[i], &its = other.dims[i];
    if (detail::axes_of(*this, mine) != detail::axes_of(other, its))
      return cat({"dim ", mine.name, " is sharded over ", detail::axes_of(other, its), ", not over ",
                  detail::axes_of(*this, mine)});
    if (mine.global != its.global)
      return cat({"dim ", mine.name, " has ", its.global, " elements on all ranks together, not ", mine.global});
    if (mine.offset != its.offset || mine.local != its.local)
      return cat({"the part has elements ", its.offset, " to ", its.offset + its.local, " of dim ", mine.name, ", not ",
                  mine.offset, " to ", mine.offset + mine.local});
  }
  for (const axis& mine : mesh)
    for (const axis& its : other.mesh)
      if (mine.name == its.name && mine.extent > 1 && mine.state != its.state)
        return cat({"the tensor is ", its.state, " over axis ", mine.name, ", not ", mine.state});
  return "";
}

}  // namespace plait
