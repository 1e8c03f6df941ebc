// The mesh and the sizes that a layer was made for, to compare with those of the context that it is called in: on plain
// pointers nothing else tells that a batch, a length or a rank's place has changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/describe.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"

namespace plait::detail {

/// The mesh, this rank's number in it, and the global sizes of the dims of a layer's boundaries, as they were when it
/// was made or resized.
class made_for {
 public:
  made_for() = default;
  made_for(const mesh_shape& mesh, std::int64_t rank, const dim_sizes& sizes,
           std::initializer_list<const layout*> boundaries)
      : mesh_(mesh), rank_(rank) {
    for (const layout* a : boundaries) add(sizes, *a);
  }
  /// Takes what a resized layer is made for. Throws where that is another mesh: its parameters lie in this one.
  void take(std::string_view layer, const mesh_shape& mesh, std::int64_t rank, const dim_sizes& sizes,
            std::initializer_list<const layout*> boundaries) {
    if (!mesh_.axes.empty()) require_mesh(layer, mesh, rank);
    *this = made_for(mesh, rank, sizes, boundaries);
  }
  /// Adds the dims of another boundary.
  void add(const dim_sizes& sizes, const layout& a) {
    for (const dim_placement& p : a.dims) {
      if (size_of(p.dim)) continue;
      const int at = sizes.dims.find(p.dim);
      if (at >= 0) dims_.push_back({p.dim, sizes.sizes[static_cast<std::size_t>(at)], static_cast<std::size_t>(at)});
    }
  }

  /// Throws, with both, if the context of a call has another mesh or another place in it.
  void require_mesh(std::string_view layer, const mesh_shape& mesh, std::int64_t rank) const {
    bool same = rank == rank_ && mesh.axes.size() == mesh_.axes.size();
    for (std::size_t i = 0; same && i < mesh.axes.size(); ++i)
      same = mesh.axes[i] == mesh_.axes[i] && mesh.extents[i] == mesh_.extents[i];
    if (!same) refuse_mesh(layer, mesh, rank);
  }
  /// Throws, with the dim and both sizes, if the context of a call has other sizes, or another mesh. Where the table of
  /// sizes has them in the same places, as one context always has, this is a few compares and no search.
  void require(std::string_view layer, const mesh_shape& mesh, std::int64_t rank, const dim_sizes& now) const {
    require_mesh(layer, mesh, rank);
    for (const made_dim& d : dims_) {
      if (d.at < now.dims.size() && now.sizes[d.at] == d.size && now.dims[d.at] == d.dim) continue;
      if (const std::int64_t other = now.of(d.dim); other != d.size) refuse(layer, d, other);
    }
  }
  /// Returns the size of a dim, or null where no boundary has it.
  const std::int64_t* size_of(dim_id dim) const {
    for (const made_dim& d : dims_)
      if (d.dim == dim) return &d.size;
    return nullptr;
  }

 private:
  struct made_dim {
    dim_id dim;
    std::int64_t size = 0;
    std::size_t at = 0;  ///< in the table of sizes
  };

  [[noreturn]] static void refuse(std::string_view layer, const made_dim& d, std::int64_t now) {
    fail({layer, ": the context of this call has ", d.dim.text(), " = ", now, ", and the layer was made for ", d.size,
          ": call the layer's resize(ctx), or make the layer, with a context of these sizes"});
  }

  [[noreturn]] void refuse_mesh(std::string_view layer, const mesh_shape& mesh, std::int64_t rank) const {
    fail({layer, ": the context of this call has rank ", rank, " of the mesh ", describe(mesh),
          ", and the layer was made for rank ", rank_, " of ", describe(mesh_),
          ": make the layer with a context of this mesh"});
  }

  mesh_shape mesh_;
  std::int64_t rank_ = 0;
  static_vector<made_dim, 24> dims_;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
