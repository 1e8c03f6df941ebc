// Tensors in and out of plait without a copy, through DLPack, the C structs by which PyTorch, JAX and CuPy share
// memory. The layout of a part comes as names and numbers, or as JSON text, for another library, process or language.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/io/json.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/tensor.hpp"

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif

namespace plait {

/// How one rank's part of a tensor lies in the whole tensor and on the mesh. No types of plait are in it.
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

/// The layout of the part that a rank of the mesh holds of a tensor that lies as `how`.
inline exported_layout export_layout(const layout& how, const box& part, const mesh_shape& mesh, std::int64_t rank) {
  exported_layout out{describe(how), {}, {}};
  for (std::size_t d = 0; d < how.dims.size(); ++d) {
    out.dims.push_back({how.dims[d].dim.text(), part.global[d], part.local[d], part.offset[d], {}});
    for (const axis_id a : how.dims[d].axes) out.dims.back().axes.emplace_back(a.text());
  }
  for (const axis_id a : mesh.axes)
    out.mesh.push_back({a.text(), mesh.extent(a), mesh.coordinate(rank, a), name_of(how.state_of(a))});
  return out;
}

/// The layout of this rank's part of a tensor with spec `Spec`. Throws if the spec mentions an axis that the context's
/// mesh does not have.
template <spec_like Spec, compute_device Device>
exported_layout export_layout(const context<Device>& ctx) {
  return export_layout(layout_v<Spec>, part_of<Spec>(ctx), ctx.ranks.shape(), ctx.ranks.rank());
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

/// Reads what `exported_layout::json` has written. Throws `error`, its text starting with `source`, for another text.
inline exported_layout parse_layout(std::string_view text, const std::string& source) {
  exported_layout out;
  json_parser in(text, source);
  const auto number = [&](std::string_view key) {
    return static_cast<std::int64_t>(in.whole_number({"as ", key, " of a layout"}, std::uint64_t{1} << 62));
  };
  const auto word = [&](std::string_view key) { return in.text({"as ", key, " of a layout"}); };
  const auto refuse = [&](const std::string& key) { in.unexpected({"as ", key, " of a layout"}, "no such member"); };
  const auto read_dim = [&](exported_layout::dim& d, const std::string& key) {
    if (key == "axes") return in.list({"as axes of a layout"}, [&] { d.axes.push_back(word("axes")); });
    if (key == "name") return static_cast<void>(d.name = word(key));
    std::int64_t* const at = key == "global"   ? &d.global
                             : key == "local"  ? &d.local
                             : key == "offset" ? &d.offset
                                               : nullptr;
    at == nullptr ? refuse(key) : static_cast<void>(*at = number(key));
  };
  const auto read_axis = [&](exported_layout::axis& a, const std::string& key) {
    if (key == "name" || key == "state") return static_cast<void>((key == "name" ? a.name : a.state) = word(key));
    if (key != "extent" && key != "coordinate") refuse(key);
    (key == "extent" ? a.extent : a.coordinate) = number(key);
  };
  const auto read_list = [&](const std::string& key, auto& list, auto&& read) {
    in.list({"as ", key, " of a layout"}, [&] {
      auto& next = list.emplace_back();
      in.object({"among ", key, " of a layout"}, [&](const std::string& member) { read(next, member); });
    });
  };
  in.object({"as a layout"}, [&](const std::string& key) {
    if (key == "spec") return static_cast<void>(out.spec = word(key));
    if (key == "dims") return read_list(key, out.dims, read_dim);
    if (key == "mesh") return read_list(key, out.mesh, read_axis);
    refuse(key);
  });
  in.end();
  return out;
}

namespace detail {

/// "2 dp * 4 tp", without axes of one rank.
inline std::string extents_of(const exported_layout& e) {
  std::string text;
  for (const exported_layout::axis& a : e.mesh)
    if (a.extent > 1) append(text, {text.empty() ? "" : " * ", a.extent, " ", a.name});
  return text.empty() ? "one rank" : text;
}
/// "tp, cp": the names of axes that have several ranks.
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

// dlpack.h declares the structs where it is on the include path. Otherwise they are declared here with equal layout
// (DLPack 0.8, and what 1.x calls unversioned).
namespace plait::dlpack {

#if __has_include(<dlpack/dlpack.h>)
using data_type = ::DLDataType;
using tensor_view = ::DLTensor;
using managed_tensor = ::DLManagedTensor;
#else
struct data_type {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct device_place {
  std::int32_t device_type;
  std::int32_t device_id;
};
struct tensor_view {
  void* data;
  device_place device;
  std::int32_t ndim;
  data_type dtype;
  std::int64_t* shape;
  std::int64_t* strides;  ///< in elements; null: row-major without gaps
  std::uint64_t byte_offset;
};
struct managed_tensor {
  tensor_view dl_tensor;
  void* manager_ctx;
  void (*deleter)(managed_tensor*);
};
#endif

namespace detail {

inline constexpr int on_cpu = 1, on_cuda = 2;

constexpr data_type type_of(dtype type) {
  constexpr std::uint8_t integer = 0, unsigned_integer = 1, floating = 2, bfloat = 4;
  const std::uint8_t code = type == dtype::bf16                        ? bfloat
                            : type == dtype::f32 || type == dtype::f64 ? floating
                            : type == dtype::u8                        ? unsigned_integer
                                                                       : integer;
  return {code, static_cast<std::uint8_t>(8 * size_of(type)), 1};
}

/// The kind of a device and its number: a device that has an `index` is a GPU.
template <class Device>
std::pair<int, int> place_of(const Device& device) {
  if constexpr (requires { device.index(); })
    return {on_cuda, device.index()};
  else
    return {on_cpu, 0};
}

template <class T, class Spec, class Device>
struct exported {
  managed_tensor handed_out{};
  tensor<T, Spec, Device> held;
  std::array<std::int64_t, max_dims> shape{};
};

}  // namespace detail

/// Hands this rank's part out. The receiver's call of `deleter` frees the memory, unless the tensor is a view. The
/// device must outlive it. On a GPU the receiver must order its work after the main stream's, as in DLPack's protocol.
/// A `managed_tensor` has only the part's shape; `export_layout<Spec>(ctx)` has its place in the whole tensor.
template <class T, spec_like Spec, compute_device Device>
managed_tensor* export_tensor(const Device& device, tensor<T, Spec, Device>&& x) {
  using holder = detail::exported<T, Spec, Device>;
  auto out = std::make_unique<holder>();
  const auto [kind, index] = detail::place_of(device);
  const box& part = x.part();
  for (int d = 0; d < part.dims; ++d) out->shape[static_cast<std::size_t>(d)] = part.local[static_cast<std::size_t>(d)];
  tensor_view& view = out->handed_out.dl_tensor;
  view.data = x.data();
  view.device.device_type = static_cast<decltype(view.device.device_type)>(kind);
  view.device.device_id = index;
  view.ndim = part.dims;
  view.dtype = detail::type_of(dtype_of<T>);
  view.shape = out->shape.data();
  out->held = std::move(x);
  out->handed_out.manager_ctx = out.get();
  out->handed_out.deleter = [](managed_tensor* m) { delete static_cast<holder*>(m->manager_ctx); };
  return &out.release()->handed_out;
}

/// A view of an external tensor that holds this rank's part of a tensor with spec `Spec`; `name` stands in the errors.
/// The external tensor must outlive the view, and whatever wrote it must come before the main stream's next work.
/// Throws `plait::error` unless type, device, shape and strides (row-major without gaps) equal the part's.
template <class T, spec_like Spec, compute_device Device>
tensor<T, Spec, Device> import_tensor(const context<Device>& ctx, const tensor_view& from, const std::string& name) {
  const data_type wanted = detail::type_of(dtype_of<T>);
  if (from.dtype.code != wanted.code || from.dtype.bits != wanted.bits || from.dtype.lanes != 1)
    fail({name, ": the DLPack tensor has elements of code ", from.dtype.code, ", ", from.dtype.bits, " bits, ",
          from.dtype.lanes, " lanes; needed is ", name_of(dtype_of<T>)});
  const auto [kind, index] = detail::place_of(ctx.device);
  if (static_cast<int>(from.device.device_type) != kind || from.device.device_id != index)
    fail({name, ": the DLPack tensor lies on device ", static_cast<int>(from.device.device_type), ":",
          from.device.device_id, "; the context's is ", kind, ":", index});
  tensor<T, Spec, Device> view(ctx, reinterpret_cast<T*>(static_cast<char*>(from.data) + from.byte_offset));
  const box& part = view.part();
  bool fits = from.ndim == part.dims;
  std::string has = "[", needed = "[";
  std::int64_t stride = 1;
  for (int d = part.dims; d-- > 0 && fits;) {
    const std::int64_t local = part.local[static_cast<std::size_t>(d)];
    fits = from.shape[d] == local && (from.strides == nullptr || local == 1 || from.strides[d] == stride);
    stride *= local;
  }
  if (fits) return view;
  for (int d = 0; d < from.ndim; ++d) append(has, {(d ? ", " : ""), from.shape[d]});
  for (int d = 0; d < part.dims; ++d) append(needed, {(d ? ", " : ""), part.local[static_cast<std::size_t>(d)]});
  fail({name, ": the DLPack tensor has shape ", has, "], and this rank's part of ", describe(layout_v<Spec>), " is ",
        needed, "], row-major without gaps"});
}

/// As above, for a tensor that came with its layout. Throws `plait::error` that names the difference unless `came_as`
/// is how `Spec` lies on the context's mesh: a part of equal shape may be another part, or a term of a pending sum.
template <class T, spec_like Spec, compute_device Device>
tensor<T, Spec, Device> import_tensor(const context<Device>& ctx, const tensor_view& from,
                                      const exported_layout& came_as, const std::string& name) {
  const exported_layout needed = export_layout<Spec>(ctx);
  if (const std::string difference = needed.difference(came_as); !difference.empty())
    fail({name, ": the DLPack tensor came as ", came_as.spec, ", and ", needed.spec, " is needed: ", difference});
  return import_tensor<T, Spec>(ctx, from, name);
}

}  // namespace plait::dlpack

#include "plait/core/macros_on.hpp"
