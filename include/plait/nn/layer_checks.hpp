// The checks of a layer's calls: its arrays, their sizes, the mesh, and the `saved` of a forward pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "plait/core/containers.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/range.hpp"
#include "plait/layout/describe.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/tensor/null_check.hpp"

namespace plait::detail {

/// The mark in what a forward pass keeps: a backward pass takes one of its own layer and microbatch, once. `layer` is
/// anything that a layer keeps its life long, such as its first parameter; `input` is where the input lies
/// that a backward pass will take, null where it takes none.
class saved_stamp {
 public:
  void make(const void* layer, std::int64_t microbatch, const void* input) {
    overwritten_ = layer_ && !used_;
    layer_ = layer, microbatch_ = microbatch, input_ = input, used_ = false;
  }
  /// Throws unless the forward pass that made it was of this layer and microbatch, and no backward pass has used it.
  /// One that no forward pass has made is used as well. Throws also where several forward passes have made it since the
  /// last use, and the input is not where that of the last one was.
  void use(std::string_view name, const void* layer, std::int64_t microbatch, const void* input) {
    constexpr const char* each = "; each forward pass makes one `saved`, for one backward pass of the same layer";
    if (used_) fail({name, ": this `saved` was used by a backward pass before", each});
    if (layer_ && layer_ != layer) fail({name, ": this `saved` was made by another layer", each});
    if (layer_ && microbatch_ != microbatch)
      fail({name, ": this `saved` is of microbatch ", microbatch_, ", and the backward pass of ", microbatch, each});
    if (overwritten_ && input_ != input)
      fail({name,
            ": several forward passes have made this `saved`, and the backward pass has the input of another than ",
            "the last", each});
    used_ = true;
  }

 private:
  const void* layer_ = nullptr;
  const void* input_ = nullptr;
  std::int64_t microbatch_ = 0;
  bool used_ = false, overwritten_ = false;
};

/// The name of a layer and of its ranges in profiles. Each call of a layer asks for one of them first: where the layer
/// was moved from, every member throws, and names it.
class layer_names {
 public:
  layer_names() = default;
  explicit layer_names(std::string_view layer) : layer_(std::make_shared<const std::string>(layer)), ranges_(layer) {}
  layer_names(const layer_names&) = default;
  layer_names& operator=(const layer_names&) = default;
  layer_names(layer_names&& from) noexcept
      : layer_(from.layer_), ranges_(std::move(from.ranges_)), mark_(std::move(from.mark_)) {}
  layer_names& operator=(layer_names&& from) noexcept {
    layer_ = from.layer_;
    ranges_ = std::move(from.ranges_);
    mark_ = std::move(from.mark_);
    return *this;
  }

  const std::string& layer() const { return checked(*layer_); }
  const char* forward() const { return checked(ranges_).forward(); }
  const char* backward() const { return checked(ranges_).backward(); }
  const char* weights() const { return checked(ranges_).weights(); }
  /// Returns `part`, which is one of the layer's.
  template <class T>
  T& checked(T& part) const {
    if (mark_.moved()) refuse();
    return part;
  }

 private:
  [[noreturn]] void refuse() const {
    fail({layer_ ? *layer_ : "a layer", ": it was moved from, and is used; use the object that it was moved to"});
  }

  std::shared_ptr<const std::string> layer_;
  range_names ranges_;
  moved_mark mark_;
};

/// The mesh, this rank's number in it, and the global sizes of a layer's boundary dims, as they were when it was made
/// or resized. Each call compares them with its context's: plain pointers have no sizes.
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

/// An array of a call, by its bytes. Null is no array, and one without bytes shares none.
struct named_array {
  template <class T>
  constexpr named_array(const T* begin, std::int64_t elements, const char* called)
      : at(begin), bytes(static_cast<std::size_t>(elements) * sizeof(T)), name(called) {}

  const void* at;
  std::size_t bytes;
  const char* name;
};

/// Throws where one of the arrays that `call` of `layer` reads shares a byte with the one that it writes.
inline void require_no_overlap(std::string_view layer, const char* call, const named_array& written,
                               std::initializer_list<named_array> read) {
  if (written.at == nullptr || written.bytes == 0) return;
  const auto begin_of = [](const named_array& a) { return reinterpret_cast<std::uintptr_t>(a.at); };
  const std::uintptr_t begin = begin_of(written), end = begin + written.bytes;
  for (const named_array& in : read) {
    const std::uintptr_t first = begin_of(in);
    if (in.at == nullptr || in.bytes == 0 || first >= end || begin >= first + in.bytes) continue;
    if (in.at == written.at)
      fail(
          {layer, ": ", call, " writes ", written.name, " while it still reads ", in.name, ", and both are one array"});
    const std::uintptr_t last = first + in.bytes < end ? first + in.bytes : end;
    fail({layer, ": ", call, " writes ", written.name, " while it still reads ", in.name, ", and they share ",
          last - (first > begin ? first : begin), " bytes"});
  }
}

/// Throws unless a tensor of a call has the elements that the layer was made for: sizes are the context's at that time.
inline void require_size(std::string_view layer, const char* name, std::int64_t has, std::int64_t made_for) {
  if (has == made_for) return;
  if (has == 0)
    fail({layer, ": ", name, " has no elements, and the layer was made for ", made_for,
          " on this rank: the tensor was moved from, or never made, or views a null pointer"});
  fail({layer, ": ", name, " has ", has, " elements on this rank, and the layer was made for ", made_for,
        ": call the layer's resize(ctx), or make the layer, with a context of these sizes"});
}

/// Returns the array of an addend, or null where there is none. Throws as `require_size`.
template <class Tensor>
auto addend_array(std::string_view layer, const Tensor* addend, std::int64_t made_for) {
  if (addend) require_size(layer, "addend", addend->size(), made_for);
  return addend ? addend->data() : nullptr;
}

/// Throws under canonical numerics, whose leaves are those of the sizes that a layer was made for.
inline void require_resizable(std::string_view layer, bool canonical) {
  if (canonical)
    fail({layer,
          ": resize under canonical numerics (deterministic), whose leaves are those of the sizes that the layer was "
          "made for: make another layer for other sizes"});
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
