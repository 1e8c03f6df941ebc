// One rank's part of a typed tensor: `tensor` owns its memory or views the program's. `take_part` and `put_part` copy
// between a part and a whole array.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

#include "plait/core/box.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#ifndef PLAIT_NO_CPU
#include "plait/device/cpu.hpp"
#endif
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/layout/part.hpp"
#include "plait/layout/spec.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/microbatch.hpp"

namespace plait {

/// One rank's part of a tensor with the layout `Spec`: contiguous, row-major in the spec's order of dims.
/// Owns its memory, or views the caller's. Move-only.
template <class T, spec_like Spec, compute_device Device = cpu>
class tensor {
 public:
  using value_type = T;
  using spec = Spec;

  tensor() = default;
  /// Allocates uninitialised memory for the sizes that the context gives to the spec's dims. All constructors throw if
  /// the spec mentions an axis that the context's mesh lacks.
  explicit tensor(const context<Device>& ctx)
      : part_(plait::part_of<Spec>(ctx)),
        own_(ctx.device, static_cast<std::size_t>(part_.local_size()) * sizeof(T)),
        data_(own_.template data<T>()) {}
  /// Views the caller's memory, which holds this rank's part.
  tensor(const context<Device>& ctx, T* data) : part_(plait::part_of<Spec>(ctx)), data_(data) {}
  /// Takes ownership of memory that holds this rank's part. Throws if it is smaller than the part.
  tensor(const context<Device>& ctx, buffer<Device> memory) : tensor(ctx, memory.template data<T>()) {
    if (const auto needed = static_cast<std::size_t>(part_.local_size()) * sizeof(T); memory.bytes() < needed)
      fail({"tensor ", describe(layout_v<Spec>), ": this rank's part has ", needed, " bytes, and the buffer has ",
            memory.bytes()});
    own_ = std::move(memory);
  }

  tensor(tensor&& other) noexcept { swap(other); }
  tensor& operator=(tensor&& other) noexcept {
    tensor(std::move(other)).swap(*this);
    return *this;
  }

  T* data() { return data_; }
  const T* data() const { return data_; }
  /// Local elements.
  std::int64_t size() const { return data_ ? part_.local_size() : 0; }
  /// Where this part lies in the global tensor.
  const box& part() const { return part_; }
  /// Local elements along the dim. Throws if the spec lacks the dim.
  std::int64_t extent(dim_id dim) const {
    const int at = layout_v<Spec>.find(dim);
    if (at < 0) fail({"tensor ", describe(layout_v<Spec>), " has no dim ", dim.text()});
    return part_.local[static_cast<std::size_t>(at)];
  }
  bool owning() const { return !own_.empty(); }
  explicit operator bool() const { return data_ != nullptr; }
  /// Converts to a typed pointer to this tensor's memory.
  operator plait::part<T, Spec>() { return detail::part_access::of<Spec>(data_, part_); }               // NOLINT
  operator plait::part<const T, Spec>() const { return detail::part_access::of<Spec>(data(), part_); }  // NOLINT
  void reset() { tensor().swap(*this); }
  /// Moves the owned memory out. The tensor keeps its part and has no memory until `give_memory`.
  buffer<Device> take_memory() {
    data_ = nullptr;
    return std::move(own_);
  }
  /// Takes ownership of memory for the same part.
  void give_memory(buffer<Device> memory) {
    own_ = std::move(memory);
    data_ = own_.template data<T>();
  }

  /// Returns this memory under an equivalent spec, in which an invariant axis may be mentioned or not.
  template <spec_like Other>
    requires(equivalent(layout_v<Spec>, layout_v<Other>))
  tensor<T, Other, Device> as() && {
    return release_to<Other>();
  }
  /// A view of this tensor under an equivalent spec. The view must not outlive the tensor.
  template <spec_like Other>
    requires(equivalent(layout_v<Spec>, layout_v<Other>))
  const tensor<T, Other, Device> view_as() const& {
    tensor<T, Other, Device> other;
    other.part_ = part_;
    other.data_ = data_;
    return other;
  }
  /// Deleted for temporaries, because the view would outlive their memory; `as` moves the memory.
  template <spec_like Other>
  const tensor<T, Other, Device> view_as() const&& = delete;
  /// Returns this memory as the gradient of its value, after the value has been overwritten with its gradient.
  tensor<T, dual_t<Spec>, Device> into_dual() && { return release_to<dual_t<Spec>>(); }

  void swap(tensor& other) noexcept {
    std::swap(part_, other.part_);
    own_.swap(other.own_);
    std::swap(data_, other.data_);
  }

 private:
  template <class, spec_like, compute_device>
  friend class tensor;

  template <class Other>
  tensor<T, Other, Device> release_to() {
    tensor<T, Other, Device> other;
    other.part_ = part_;
    other.own_ = std::move(own_);
    other.data_ = std::exchange(data_, nullptr);
    return other;
  }

  box part_;
  buffer<Device> own_;
  T* data_ = nullptr;
};

namespace detail {

/// Throws if the caller's pointer to `size` elements is null. `where` names a layer or a function.
inline void require_array(std::string_view where, const char* name, const void* pointer, std::int64_t size) {
  if (pointer == nullptr && size > 0)
    fail({where, ": ", name, " is a null pointer; it must point to this rank's ", size, " elements"});
}

}  // namespace detail

/// A view of the caller's memory, which holds this rank's part of a tensor with this spec. Read-only memory becomes a
/// `part<const T, Spec>`. Throws if the pointer is null and this rank's part is not empty.
template <spec_like Spec, class T, compute_device Device>
  requires(!std::is_const_v<T>)
tensor<T, Spec, Device> view(const context<Device>& ctx, T* data) {
  tensor<T, Spec, Device> seen(ctx, data);
  detail::require_array("view", "the pointer", data, seen.part().local_size());
  return seen;
}
template <spec_like Spec, class T, compute_device Device>
part<const T, Spec> view(const context<Device>& ctx, const T* data) {
  return {ctx, data};
}

namespace detail {

inline box whole_box(const box& part) {
  box whole = part;
  whole.offset = {};
  whole.local = part.global;
  return whole;
}
inline void require_arrays(const char* call, const box& part, const void* whole, const char* name, const void* mine) {
  if (whole == nullptr)
    fail({call, ": whole is a null pointer; it must point to the whole array's ", without_padding(part).global_size(),
          " elements"});
  require_array(call, name, mine, part.local_size());
}
/// Throws unless the whole array has as many elements as the tensor of `part`.
inline void require_whole(const char* call, const box& part, std::int64_t elements) {
  const std::int64_t needed = without_padding(part).global_size();
  if (elements == needed) return;
  fail({call, ": whole has ", elements, " elements, and the part is of an array of ", needed,
        "; where a parameter is padded, give the parameter itself in place of a part: ", call,
        "(device, *layer.weight(), ...), whose array is without padding"});
}
/// Zeroes the padding rows of `values`, this rank's part.
template <class T, compute_device Device>
void zero_padding(Device& device, const box& part, T* values) {
  if (part.padding == 0) return;
  const std::int64_t kept = without_padding(part).local_size(), all = part.local_size();
  if (kept < all) device.zero(values + kept, static_cast<std::size_t>(all - kept) * sizeof(T), device.main_stream());
}

/// An array with a known number of elements: a vector, an array, a span.
template <class Array>
concept counted_array = requires(Array& a) {
  a.data();
  { a.size() } -> std::convertible_to<std::size_t>;
};
/// Returns a pointer to the whole array.
template <class Whole>
auto whole_elements(const char* call, const box& part, Whole& whole) {
  if constexpr (counted_array<Whole>) {
    require_whole(call, part, static_cast<std::int64_t>(whole.size()));
    return whole.data();
  } else {
    return whole;
  }
}

}  // namespace detail

/// Copies the elements of `part` from the row-major array `whole` to `out`, which has part.local elements. Both are in
/// the device's memory, and the copy runs in its main stream. No data is sent between ranks: every rank has the whole
/// array. `whole` has part.global elements, without the padding rows of `part`, which become zero in `out`. Only parts
/// of parameters have padding. `whole` is a pointer, a vector or a span; the latter two are checked for their number of
/// elements.
template <class T, compute_device Device, class Whole>
void take_part(Device& device, const box& part, const Whole& whole, T* out) {
  const T* const from = detail::whole_elements("take_part", part, whole);
  if (part.local_size() == 0) return;
  detail::require_arrays("take_part", part, from, "out", out);
  const box kept = without_padding(part);
  kernels::copy_box(device, from, detail::whole_box(kept), out, kept, kept, static_cast<std::int64_t>(sizeof(T)));
  detail::zero_padding(device, part, out);
}
/// Copies elements of `in` back to their place in the whole array, whose other elements stay. Padding is not copied.
template <class T, compute_device Device, class Whole>
void put_part(Device& device, const box& part, const T* in, Whole&& whole) {
  T* const to = detail::whole_elements("put_part", part, whole);
  if (part.local_size() == 0) return;
  detail::require_arrays("put_part", part, to, "in", in);
  const box kept = without_padding(part);
  kernels::copy_box(device, in, kept, to, detail::whole_box(kept), kept, static_cast<std::int64_t>(sizeof(T)));
}

/// Both copies for a typed pointer, which knows its part's place.
template <class T, spec_like Spec, compute_device Device, class Whole>
void take_part(Device& device, const Whole& whole, const part<T, Spec>& out) {
  take_part(device, out.where(), whole, out.unchecked());
}
template <class T, spec_like Spec, compute_device Device, class Whole>
void put_part(Device& device, const part<T, Spec>& in, Whole&& whole) {
  put_part(device, in.where(), static_cast<const std::remove_const_t<T>*>(in.unchecked()), whole);
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
