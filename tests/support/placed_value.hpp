#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "plait/layout/layout.hpp"

/// Arrays of integers with named dims, for tests of the algebra. Elements are unsigned, so sums and products are exact
/// modulo 2^64. Values spread over the ranks of a mesh, and every layout that a value can have.
namespace plait::test {

using element = std::uint64_t;

struct array {
  std::vector<dim_id> dims;
  std::vector<std::int64_t> sizes;
  std::vector<element> data;

  array() = default;
  array(std::vector<dim_id> names, std::vector<std::int64_t> extents)
      : dims(std::move(names)), sizes(std::move(extents)) {
    std::int64_t n = 1;
    for (std::int64_t s : sizes) n *= s;
    data.assign(static_cast<std::size_t>(n), 0);
  }

  int find(dim_id dim) const {
    for (std::size_t i = 0; i < dims.size(); ++i)
      if (dims[i] == dim) return static_cast<int>(i);
    return -1;
  }
  bool has(dim_id dim) const { return find(dim) >= 0; }
  std::int64_t size_of(dim_id dim) const {
    const int i = find(dim);
    return i < 0 ? 1 : sizes[static_cast<std::size_t>(i)];
  }
  /// Distance of neighbours along `dim`; 0 (broadcast) if the array does not have the dim.
  std::int64_t stride(dim_id dim) const {
    const int i = find(dim);
    if (i < 0) return 0;
    std::int64_t n = 1;
    for (std::size_t j = static_cast<std::size_t>(i) + 1; j < sizes.size(); ++j) n *= sizes[j];
    return n;
  }
  array like() const { return array(dims, sizes); }
  friend bool operator==(const array&, const array&) = default;
};

inline array& operator+=(array& a, const array& b) {
  for (std::size_t i = 0; i < a.data.size(); ++i) a.data[i] += b.data[i];
  return a;
}

/// A loop over the dims of several arrays together: `body(offsets)` gets the offset into each array.
class joint_loop {
 public:
  explicit joint_loop(std::vector<const array*> all) : count_(all.size()) {
    for (const array* a : all)
      for (dim_id dim : a->dims) add(dim, a->size_of(dim), all);
  }

  template <class Body>
  void run(Body&& body) const {
    std::vector<std::int64_t> index(sizes_.size(), 0), offset(count_, 0);
    for (std::int64_t s : sizes_)
      if (s == 0) return;
    for (;;) {
      body(offset);
      std::size_t d = sizes_.size();
      while (d > 0) {
        --d;
        for (std::size_t a = 0; a < count_; ++a) offset[a] += strides_[d][a];
        if (++index[d] < sizes_[d]) break;
        for (std::size_t a = 0; a < count_; ++a) offset[a] -= sizes_[d] * strides_[d][a];
        index[d] = 0;
        if (d == 0) return;
      }
      if (sizes_.empty()) return;
    }
  }

 private:
  void add(dim_id dim, std::int64_t size, const std::vector<const array*>& all) {
    for (dim_id known : dims_)
      if (known == dim) return;
    dims_.push_back(dim);
    sizes_.push_back(size);
    strides_.emplace_back();
    for (const array* a : all) strides_.back().push_back(a->stride(dim));
  }

  std::size_t count_;
  std::vector<dim_id> dims_;
  std::vector<std::int64_t> sizes_;
  std::vector<std::vector<std::int64_t>> strides_;
};

/// Small random integers, none of them zero.
inline array random_array(const std::vector<dim_id>& dims, const dim_sizes& sizes, std::mt19937_64& random) {
  std::vector<std::int64_t> extents;
  for (dim_id dim : dims) extents.push_back(sizes.of(dim));
  array a(dims, extents);
  for (element& x : a.data) x = static_cast<element>(static_cast<std::int64_t>(random() % 97) + 1);
  return a;
}

/// Calls f(element of the part, element of the global array `whole`) for each element of `part`.
template <class F>
void each_element(const array& whole, const box& part, F&& f) {
  for (std::int64_t i = 0; i < part.local_size(); ++i) {
    std::int64_t rest = i, at = 0, stride = 1;
    for (std::size_t d = whole.dims.size(); d-- > 0;) {
      at += (part.offset[d] + rest % part.local[d]) * stride;
      rest /= part.local[d];
      stride *= whole.sizes[d];
    }
    f(static_cast<std::size_t>(i), static_cast<std::size_t>(at));
  }
}
/// The elements of the global array `whole` in `part`.
inline array cut(const array& whole, const box& part) {
  array a(whole.dims, {part.local.begin(), part.local.begin() + part.dims});
  each_element(whole, part, [&](std::size_t i, std::size_t at) { a.data[i] = whole.data[at]; });
  return a;
}
/// Adds `a` into its place in `whole`.
inline void paste(array& whole, const array& a, const box& part) {
  each_element(whole, part, [&](std::size_t i, std::size_t at) { whole.data[at] += a.data[i]; });
}

/// The local part of each rank.
using shards = std::vector<array>;

/// A mesh and the global sizes of dims.
struct world {
  mesh_shape mesh;
  dim_sizes sizes;

  box part(const layout& a, std::int64_t rank) const { return local_box(a, mesh, sizes, rank); }
};

/// Dims of tests.
struct row : dim_tag<"row"> {};
struct column : dim_tag<"column"> {};
struct inner : dim_tag<"inner"> {};
struct group : dim_tag<"group"> {};
struct token : dim_tag<"token"> {};
struct line : dim_tag<"line"> {};

inline std::vector<dim_id> dims_of(const layout& a) {
  std::vector<dim_id> dims;
  for (const dim_placement& p : a.dims) dims.push_back(p.dim);
  return dims;
}

/// Lays `whole` out: shards where dims are sharded, uneven random terms where it is partial, copies elsewhere.
inline shards spread(const array& whole, const layout& a, const world& w, std::mt19937_64& random) {
  const std::int64_t count = w.mesh.size(a.partial);
  shards terms;
  array rest = whole;
  for (std::int64_t t = 0; t + 1 < count; ++t) {
    terms.push_back(random_array(whole.dims, w.sizes, random));
    for (std::size_t i = 0; i < rest.data.size(); ++i) rest.data[i] -= terms.back().data[i];
  }
  terms.push_back(rest);
  shards placed;
  for (std::int64_t rank = 0; rank < w.mesh.size(); ++rank)
    placed.push_back(cut(terms[static_cast<std::size_t>(w.mesh.index_in(rank, a.partial))], w.part(a, rank)));
  return placed;
}

/// The value that shards represent under a layout. Returns nothing where they do not fit it: a local size is wrong, or
/// copies differ.
inline std::optional<array> assemble(const shards& held, const layout& a, const world& w) {
  array whole;
  for (dim_id dim : dims_of(a)) whole.dims.push_back(dim), whole.sizes.push_back(w.sizes.of(dim));
  whole = array(whole.dims, whole.sizes);
  axis_list copies;
  for (axis_id axis : w.mesh.axes)
    if (const state s = a.state_of(axis); s == state::replicated || s == state::invariant) copies.push_back(axis);
  const axis_list others = w.mesh.others(copies);
  std::vector<const array*> first(static_cast<std::size_t>(w.mesh.size(others)), nullptr);
  for (std::int64_t rank = 0; rank < w.mesh.size(); ++rank) {
    const array& mine = held[static_cast<std::size_t>(rank)];
    const box part = w.part(a, rank);
    if (mine.dims != whole.dims) return std::nullopt;
    for (std::size_t d = 0; d < mine.dims.size(); ++d)
      if (mine.sizes[d] != part.local[d]) return std::nullopt;
    const array*& same = first[static_cast<std::size_t>(w.mesh.index_in(rank, others))];
    if (same == nullptr) {
      same = &mine;
      paste(whole, mine, part);
    } else if (!(*same == mine)) {
      return std::nullopt;
    }
  }
  return whole;
}

/// Every layout of `dims` on the mesh: each axis in each state, sharded axes in each order. Each layout names all axes.
inline std::vector<layout> all_layouts(const std::vector<dim_id>& dims, const mesh_shape& mesh) {
  layout bare;
  for (dim_id dim : dims) bare.dims.push_back({dim, {}});
  std::vector<layout> found{bare};
  for (axis_id axis : mesh.axes) {
    std::vector<layout> next;
    for (const layout& a : found) {
      for (state s : {state::invariant, state::replicated, state::partial}) {
        next.push_back(a);
        next.back().set(axis, s);
      }
      for (std::size_t d = 0; d < a.dims.size(); ++d)
        for (std::size_t at = 0; at <= a.dims[d].axes.size(); ++at) {
          next.push_back(a);
          next.back().dims[d].axes.insert(at, axis);
        }
    }
    found = next;
  }
  return found;
}

/// The layouts under which every rank has elements.
inline std::vector<layout> layouts_that_fit(const std::vector<dim_id>& dims, const world& w) {
  std::vector<layout> kept;
  for (const layout& a : all_layouts(dims, w.mesh))
    if (check_parts(a, w.mesh, w.sizes).ok()) kept.push_back(a);
  return kept;
}

struct mesh_a : axis_tag<"a"> {};
struct mesh_b : axis_tag<"b"> {};
struct mesh_c : axis_tag<"c"> {};
struct mesh_d : axis_tag<"d"> {};

inline mesh_shape make_mesh(std::initializer_list<std::int64_t> extents) {
  const axis_id axes[] = {axis_of<mesh_a>, axis_of<mesh_b>, axis_of<mesh_c>, axis_of<mesh_d>};
  mesh_shape shape;
  for (std::int64_t extent : extents) shape.add(axes[shape.axes.size()], extent);
  return shape;
}
/// A mesh of these extents, and these sizes of the first of `dims`.
inline world make_world(std::initializer_list<std::int64_t> extents, const std::vector<dim_id>& dims,
                        std::initializer_list<std::int64_t> sizes) {
  world w{make_mesh(extents), {}};
  std::size_t d = 0;
  for (std::int64_t size : sizes) w.sizes.set(dims[d++], size);
  return w;
}

}  // namespace plait::test
