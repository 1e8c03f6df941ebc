// One rank's part of a whole array, copied out of it or into it: for programs that read or write whole tensors. Nothing
// is sent: every rank has the whole.
#pragma once

#include <cstdint>

#include "plait/core/box.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/tensor/context.hpp"
#include "plait/tensor/null_check.hpp"

namespace plait {

namespace detail {

inline box whole_box(const box& part) {
  box whole = part;
  whole.offset = {};
  whole.local = part.global;
  return whole;
}
inline void require_arrays(const char* call, const box& part, const void* whole, const char* name, const void* mine) {
  if (whole == nullptr)
    fail({call, ": whole is a null pointer; it must point to the whole array's ", part.global_size(), " elements"});
  require_array(call, name, mine, part.local_size());
}

}  // namespace detail

/// Copies the elements of `part` from the row-major array `whole`, of part.global elements, to `out`, of part.local:
/// both in the device's memory, in its main stream. Of a parameter, whose padding such an array may lack, the overload
/// in nn/parameter.hpp takes one.
template <class T, compute_device Device>
void take_part(Device& device, const box& part, const T* whole, T* out) {
  if (part.local_size() == 0) return;
  detail::require_arrays("take_part", part, whole, "out", out);
  kernels::copy_box(device, whole, detail::whole_box(part), out, part, part, static_cast<std::int64_t>(sizeof(T)));
}
/// Copies them back to their place in the whole array, whose other elements stay.
template <class T, compute_device Device>
void put_part(Device& device, const box& part, const T* in, T* whole) {
  if (part.local_size() == 0) return;
  detail::require_arrays("put_part", part, whole, "in", in);
  kernels::copy_box(device, in, part, whole, detail::whole_box(part), part, static_cast<std::int64_t>(sizeof(T)));
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
