// Typed views of a program's own memory, which it may have declared const: what layers take beside plain pointers. They
// own nothing.
#pragma once

#include <cstdint>
#include <type_traits>

#include "plait/tensor/null_check.hpp"
#include "plait/tensor/tensor.hpp"

namespace plait {

/// A view of the caller's memory, which holds this rank's part of a tensor with this spec: a `tensor`, or, of memory
/// that is const, a `const_tensor`. Throws where the pointer is null, and this rank's part is not empty.
///
///     up.forward(ctx, pl::view<rows>(ctx, x), y);   // x: const float*
template <spec_like Spec, class T, compute_device Device>
  requires(!std::is_const_v<T>)
tensor<T, Spec, Device> view(const context<Device>& ctx, T* data) {
  tensor<T, Spec, Device> seen(ctx, data);
  detail::require_array("view", "the pointer", data, seen.part().local_size());
  return seen;
}

/// A view of memory that may only be read, which holds this rank's part of a tensor. It stands wherever a layer takes a
/// tensor that it does not write; `get` is for templates, which look through no conversion. `view<Spec>(ctx, pointer)`
/// makes one.
template <class T, spec_like Spec, compute_device Device = cpu>
class const_tensor {
 public:
  using value_type = T;
  using spec = Spec;

  /// Throws if the spec mentions an axis that the context's mesh does not have, and where the pointer is null.
  const_tensor(const context<Device>& ctx, const T* data) : view_(view<Spec>(ctx, const_cast<T*>(data))) {}

  const T* data() const { return view_.data(); }
  /// Local elements.
  std::int64_t size() const { return view_.size(); }
  /// Where this part lies in the global tensor.
  const box& part() const { return view_.part(); }
  /// Local elements along the dim.
  std::int64_t extent(dim_id dim) const { return view_.extent(dim); }

  const tensor<T, Spec, Device>& get() const { return view_; }
  operator const tensor<T, Spec, Device>&() const { return view_; }  // NOLINT: the conversion is the purpose

 private:
  tensor<T, Spec, Device> view_;  ///< handed out as const alone: what it views is not written
};

/// A view of memory that is const.
template <spec_like Spec, class T, compute_device Device>
const_tensor<T, Spec, Device> view(const context<Device>& ctx, const T* data) {
  return {ctx, data};
}

}  // namespace plait
