// A typed pointer to a rank's part of a tensor, in memory that the program owns; its type carries the spec. A program
// makes one for each array. Typed groups, layers and `apply` (layout/apply.hpp) take it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/layout/rules.hpp"
#include "plait/layout/spec.hpp"

namespace plait {

/// Returns a table of global sizes, for a context or a rank_place: `sizes_of<batch, seq, hidden>(8, 1024, 512)`.
template <dim_like... Dims, class... Sizes>
  requires(sizeof...(Dims) == sizeof...(Sizes) && (std::is_convertible_v<Sizes, std::int64_t> && ...))
constexpr dim_sizes sizes_of(Sizes... sizes) {
  dim_sizes table;
  (table.set(dim_of<Dims>, static_cast<std::int64_t>(sizes)), ...);
  return table;
}

namespace detail {
/// Refuses an argument of `sizes_of` that is not a dim.
template <auto Given>
constexpr dim_sizes refuse_size_of() {
  static_assert(
      always_false<decltype(Given)>,
      "sizes_of takes dims, and one of these names is a function or a value of the program's, which hides the "
      "dim: write plait::batch, or give the function another name");
  return {};
}
}  // namespace detail

/// Selected if a function or a value of the program hides one of the first four dims; refuses to compile.
template <auto Given, class... Rest>
constexpr dim_sizes sizes_of(...) {
  return detail::refuse_size_of<Given>();
}
template <class, auto Given, class... Rest>
constexpr dim_sizes sizes_of(...) {
  return detail::refuse_size_of<Given>();
}
template <class, class, auto Given, class... Rest>
constexpr dim_sizes sizes_of(...) {
  return detail::refuse_size_of<Given>();
}
template <class, class, class, auto Given, class... Rest>
constexpr dim_sizes sizes_of(...) {
  return detail::refuse_size_of<Given>();
}
/// Selected if an argument is not a dim, or if the numbers of sizes and dims differ; refuses to compile.
template <class... Dims, class... Sizes>
  requires(!(dim_like<Dims> && ...) || sizeof...(Dims) != sizeof...(Sizes))
constexpr dim_sizes sizes_of(Sizes...) {
  static_assert((dim_like<Dims> && ...), "sizes_of takes dims: structs that derive from plait::dim_tag");
  static_assert(!(dim_like<Dims> && ...) || sizeof...(Dims) == sizeof...(Sizes),
                "sizes_of takes one size for each dim, in the order of the dims");
  return {};
}

/// Throws unless every rank has elements of every dim, and every dim with blocks consists of whole blocks. The text
/// names the dim, its size, the axes and their extents.
void enforce_parts(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes, std::string_view where);

/// A rank's place: the mesh, its rank number, and the global sizes of dims. Programs without a `context` make one.
///
///     const pl::rank_place here{mesh::static_shape(), rank, pl::sizes_of<batch, hidden>(64, 512)};
struct rank_place {
  mesh_shape mesh;
  std::int64_t rank = 0;
  dim_sizes sizes;
};

namespace detail {
/// `part_of` for a tensor with layout `a`, which mentions the axes `mentioned`.
box checked_part(const layout& a, const axis_list& mentioned, const mesh_shape& mesh, const dim_sizes& sizes,
                 std::int64_t rank);
}  // namespace detail

/// Returns the part of a tensor with this spec that a rank holds. Throws if the spec mentions an axis that the mesh
/// lacks, or if a dim has no size or fewer elements than ranks. A tensor's spec may leave axes unmentioned; only the
/// boundary of a layer must mention all. Programs make tensors in every step, so the check only compares a few
/// addresses.
template <spec_like Spec>
box part_of(const mesh_shape& mesh, const dim_sizes& sizes, std::int64_t rank) {
  static constexpr axis_list mentioned = layout_v<Spec>.mentioned();
  return detail::checked_part(layout_v<Spec>, mentioned, mesh, sizes, rank);
}
template <spec_like Spec>
box part_of(const rank_place& here) {
  return part_of<Spec>(here.mesh, here.sizes, here.rank);
}

template <class T, spec_like Spec>
class part;

namespace detail {

/// Makes parts without checks: a part with another spec for the same memory, after a collective made that spec true,
/// and the part of a tensor's memory.
struct part_access {
  template <class To, class T, class From>
  static constexpr part<T, To> with_spec(const part<T, From>& in) {
    part<T, To> out;
    out.data_ = in.data_, out.size_ = in.size_, out.where_ = in.where_;
    return out;
  }
  template <class Spec, class T>
  static constexpr part<T, Spec> of(T* data, const box& where) {
    part<T, Spec> out;
    out.data_ = data, out.size_ = data ? where.local_size() : 0, out.where_ = where;
    return out;
  }
};

}  // namespace detail

/// A pointer to this rank's part of a tensor with the layout `Spec` (row-major, without gaps), and the part's place in
/// the tensor. It owns no memory and is cheap to copy. `T` is const if the program may only read.
///
///     const pl::part<float, residual> x(ctx, my_pointer);   // the one place where this pointer gets its type
template <class T, spec_like Spec>
class part {
 public:
  using value_type = std::remove_const_t<T>;
  using spec = Spec;

  /// A part without memory, for an array that a call leaves out, such as the gradient of the first layer's input.
  constexpr part() = default;
  /// `place` is a context or a `rank_place`. Throws as `part_of` does, and if the pointer is null although this rank's
  /// part has elements.
  template <class Place>
  part(const Place& place, T* data) : data_(data), where_(part_of<Spec>(place)) {
    size_ = where_.local_size();
    if (data == nullptr && size_ > 0)
      fail({"part ", describe(layout_v<Spec>), ": the pointer is null; it must point to this rank's ", size_,
            " elements"});
  }
  /// A part of `memory`, such as a vector or a span, which has at least as many elements as this rank's part. Throws
  /// also if it has fewer.
  template <class Place, class Memory>
    requires(
        !requires { typename std::remove_cvref_t<Memory>::spec; } &&
        requires(Memory& m, T*& data) { data = m.data(), m.size(); })
  part(const Place& place, Memory&& memory) : part(place, memory.data()) {
    if (static_cast<std::int64_t>(memory.size()) < size_)
      fail({"part ", describe(layout_v<Spec>), ": the array has ", memory.size(), " elements; this rank's part has ",
            size_});
  }
  /// Converts a writable part to a read-only one, or a part of a type with the same bits as T to a part of T.
  template <class Other>
    requires(!std::is_same_v<Other, T> &&
             (std::is_same_v<const Other, T> || (same_bits<std::remove_const_t<Other>, std::remove_const_t<T>> &&
                                                 (std::is_const_v<T> || !std::is_const_v<Other>))))
  part(const part<Other, Spec>& other)  // NOLINT: the conversion is the purpose
      : data_(elements_of<std::remove_const_t<T>>(other.unchecked())), size_(other.size()), where_(other.where()) {}

  /// The bare pointer, without the type's protection.
  constexpr T* unchecked() const { return data_; }
  /// Local elements.
  constexpr std::int64_t size() const { return size_; }
  /// Where this part lies in the global tensor.
  constexpr const box& where() const { return where_; }
  /// Local elements along the dim. Throws if the spec lacks the dim.
  std::int64_t extent(dim_id dim) const {
    const int at = layout_v<Spec>.find(dim);
    if (at < 0) fail({"part ", describe(layout_v<Spec>), " has no dim ", dim.text()});
    return where_.local[at];
  }
  template <dim_like Dim>
  std::int64_t extent() const {
    static_assert(layout_v<Spec>.has(dim_of<Dim>), "the spec of this part has no such dim");
    return where_.local[layout_v<Spec>.find(dim_of<Dim>)];
  }
  constexpr explicit operator bool() const { return data_ != nullptr; }

  /// Types this memory as the gradient of its value, after a kernel or a loss has overwritten the value with its
  /// gradient.
  constexpr part<T, dual_t<Spec>> dual() const { return detail::part_access::with_spec<dual_t<Spec>>(*this); }

 private:
  friend struct detail::part_access;

  T* data_ = nullptr;
  std::int64_t size_ = 0;
  box where_{};
};

namespace detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_other_shape(const char* call) {
  fail({call, ": in and out are parts of tensors of other sizes; make both for one context, or one rank_place"});
}
/// Throws unless two arrays of a call are parts of tensors of equal shape. Parts that were made for one place always
/// are.
inline void require_one_shape(const char* call, const box& in, const box& out) {
  if (!same_tensor(in, out)) refuse_other_shape(call);
}

}  // namespace detail

#ifndef PLAIT_COMPILED
PLAIT_INLINE void enforce_parts(const layout& a, const mesh_shape& mesh, const dim_sizes& sizes,
                                std::string_view where) {
  for (const dim_placement& p : a.dims) {
    const std::int64_t size = sizes.of(p.dim), block = sizes.block_of(p.dim), ranks = mesh.size(p.axes);
    if (size < 0) fail({where, ": the context gives no size for the dim ", p.dim.text()});
    if (block < 1 || size % block != 0)
      fail({where, ": the dim ", p.dim.text(), " has ", size, " elements, which are not whole blocks of ", block,
            " (dim_sizes::set)"});
    if (size / block >= ranks) continue;
    std::string extents;
    for (axis_id axis : p.axes) append(extents, {extents.empty() ? "" : " x ", axis.text(), "=", mesh.extent(axis)});
    fail({where, ": ", text_of(layout_error::too_few_elements), ": ", p.dim.text(), " is ", size,
          block > 1 ? cat({", in blocks of ", block}) : "", ", sharded over ", extents, " = ", ranks,
          " ranks; it must be at least ", ranks * block});
  }
}

PLAIT_INLINE box detail::checked_part(const layout& a, const axis_list& mentioned, const mesh_shape& mesh,
                                      const dim_sizes& sizes, std::int64_t rank) {
  for (axis_id axis : mentioned)
    if (!mesh.has(axis)) enforce(check_boundary(a, mesh), "tensor " + describe(a));
  const box where = local_box(a, mesh, sizes, rank);
  for (std::size_t d = 0; d < static_cast<std::size_t>(where.dims); ++d)
    if (where.global[d] < mesh.size(a.dims[d].axes) * sizes.block_of(a.dims[d].dim))
      enforce_parts(a, mesh, sizes, "tensor " + describe(a));
  return where;
}
#endif

}  // namespace plait

#include "plait/core/macros_on.hpp"
