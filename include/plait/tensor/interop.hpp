// Passes tensors into and out of plait without a copy, through DLPack, the C structs with which PyTorch, JAX and CuPy
// share memory. `exported_layout` describes a part's layout in names and numbers, or as JSON text, for other libraries
// and processes.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
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

/// How one rank's part of a tensor lies in the whole tensor and on the mesh, without types of plait.
struct exported_layout {
  /// One dim, in the order of the part's memory. Sizes and the offset are in elements along the dim.
  struct dim {
    std::string name;
    std::int64_t global = 0, local = 0, offset = 0;
    std::vector<std::string> axes;  ///< the axes that shard it, the first one major

    template <class Self, class F>
    static void visit(Self& d, F&& f) {
      f("name", d.name), f("global", d.global), f("local", d.local), f("offset", d.offset), f("axes", d.axes);
    }
    friend bool operator==(const dim&, const dim&) = default;
  };
  /// An axis of the mesh, major first.
  struct axis {
    std::string name;
    std::int64_t extent = 1;      ///< ranks along it
    std::int64_t coordinate = 0;  ///< this rank's place along it
    std::string state;            ///< the tensor's state along it: "varying", "partial", "replicated" or "invariant"

    template <class Self, class F>
    static void visit(Self& a, F&& f) {
      f("name", a.name), f("extent", a.extent), f("coordinate", a.coordinate), f("state", a.state);
    }
    friend bool operator==(const axis&, const axis&) = default;
  };

  std::string spec;  ///< the spec in the form that errors use: "<batch, shard<hidden, tp>>"
  std::vector<dim> dims;
  std::vector<axis> mesh;

  /// Calls f(key, member) for each member, with its key in the JSON text. `dim` and `axis` have the same function.
  template <class Self, class F>
  static void visit(Self& e, F&& f) {
    f("spec", e.spec), f("dims", e.dims), f("mesh", e.mesh);
  }
  friend bool operator==(const exported_layout&, const exported_layout&) = default;

  /// Returns one object on one line: {"spec": ..., "dims": [{"name", "global", "local", "offset", "axes"}...], "mesh":
  /// [{"name", "extent", "coordinate", "state"}...]}.
  std::string json() const;
};

/// Describes the part of a tensor with layout `how` that a rank of the mesh holds.
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

/// Describes this rank's part of a tensor with spec `Spec`. Throws if the spec mentions an axis that the context's mesh
/// lacks.
template <spec_like Spec, compute_device Device>
exported_layout export_layout(const context<Device>& ctx) {
  return export_layout(layout_v<Spec>, part_of<Spec>(ctx), ctx.ranks.shape(), ctx.ranks.rank());
}

namespace detail {

template <class T>
json_object layout_json(const T& from) {
  json_object out;
  T::visit(from, [&]<class Member>(std::string_view key, const Member& member) {
    if constexpr (requires { member.data()->name; }) {
      std::vector<json_object> list;
      for (const auto& one : member) list.push_back(layout_json(one));
      out.add(key, list);
    } else {
      out.add(key, member);
    }
  });
  return out;
}

template <class T>
void read_layout(json_parser& in, json_place where, std::string_view key, T& to) {
  if constexpr (std::is_same_v<T, std::string>) {
    to = in.text(where);
  } else if constexpr (std::is_same_v<T, std::int64_t>) {
    to = static_cast<T>(in.whole_number(where, std::uint64_t{1} << 62));
  } else if constexpr (requires { to.emplace_back(); }) {
    in.list(where, [&] { read_layout(in, {"among ", key, " of a layout"}, key, to.emplace_back()); });
  } else {
    in.object(where, [&](const std::string& name) {
      bool known = false;
      T::visit(to, [&](std::string_view one, auto& member) {
        if (one == name) known = true, read_layout(in, {"as ", name, " of a layout"}, name, member);
      });
      if (!known) in.unexpected({"as ", name, " of a layout"}, "no such member");
    });
  }
}

}  // namespace detail

inline std::string exported_layout::json() const { return detail::layout_json(*this).text(); }

/// Reads the text of `exported_layout::json`. Throws `error` for any other text; the error begins with `source`.
inline exported_layout parse_layout(std::string_view text, const std::string& source) {
  exported_layout out;
  json_parser in(text, source);
  detail::read_layout(in, {"as a layout"}, "", out);
  in.end();
  return out;
}

}  // namespace plait

// Declares the structs of DLPack 0.8 (in 1.x: the unversioned ones) with the same memory layout, unless dlpack.h is on
// the include path and declares them.
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

/// The kind and number of a device. A device with an `index` is a GPU.
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

/// Exports this rank's part. The receiver frees the memory by a call of `deleter`, unless the tensor is a view. The
/// device must outlive the exported tensor. On a GPU the receiver must order its work after the main stream's, as
/// DLPack's protocol says. A `managed_tensor` has only the part's shape; `export_layout<Spec>(ctx)` describes its place
/// in the whole tensor.
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

/// Returns a view of an external tensor that holds this rank's part of a tensor with spec `Spec`. `name` appears in the
/// errors. The external tensor must outlive the view, and its writes must come before the main stream's next work.
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

namespace detail {
/// Removes the fields that do not affect the part: the spec's text, axes of one rank, and the rank's coordinates.
inline exported_layout essential(exported_layout e) {
  e.spec.clear();
  std::erase_if(e.mesh, [](const exported_layout::axis& a) { return a.extent == 1; });
  for (exported_layout::axis& a : e.mesh) a.coordinate = 0;
  for (exported_layout::dim& d : e.dims)
    std::erase_if(d.axes, [&](const std::string& name) {
      return std::none_of(e.mesh.begin(), e.mesh.end(), [&](const exported_layout::axis& a) { return a.name == name; });
    });
  return e;
}
}  // namespace detail

/// Imports a tensor that came with its layout, like the function above. Throws `plait::error` with both layouts unless
/// `came_as` equals the layout of `Spec` on the context's mesh. A part of equal shape may be another part, or a term of
/// a pending sum.
template <class T, spec_like Spec, compute_device Device>
tensor<T, Spec, Device> import_tensor(const context<Device>& ctx, const tensor_view& from,
                                      const exported_layout& came_as, const std::string& name) {
  const exported_layout needed = export_layout<Spec>(ctx);
  if (detail::essential(needed) != detail::essential(came_as))
    fail({name, ": the DLPack tensor came as ", came_as.json(), ", and ", needed.json(), " is needed"});
  return import_tensor<T, Spec>(ctx, from, name);
}

}  // namespace plait::dlpack

#include "plait/core/macros_on.hpp"
