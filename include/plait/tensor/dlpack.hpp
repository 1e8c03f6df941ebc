// Tensors in and out by way of DLPack, the C structs through which PyTorch, JAX and CuPy share memory; nothing is
// copied or gathered. The structs are those of dlpack.h where it is on the include path, else declared here with equal
// layout (DLPack 0.8, and what 1.x calls unversioned). They know a part's shape alone: tensor/exported_layout.hpp has
// its place in the whole tensor.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/check.hpp"
#include "plait/tensor/exported_layout.hpp"
#include "plait/tensor/tensor.hpp"

#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#endif

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

/// Hands this rank's part out; the memory goes when the receiver calls the `deleter`, or, if the tensor is a view, when
/// its owner says so. The device must outlive it. On a GPU the receiver must order its work after the main stream's, as
/// DLPack's protocol has it. A `managed_tensor` tells the part's shape alone; `export_layout<Spec>(ctx)` tells the
/// receiver which part of which tensor it is.
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
/// Throws `plait::error` unless type, device, shape and strides (row-major without gaps) are those of the part.
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
