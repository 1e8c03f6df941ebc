// The memory that kernels add gradients to: the parameter's own, where it is of the type in which they sum, or numbers
// of that type, which are then added to narrower gradients and rounded once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"
#include "plait/kernels/kernels.hpp"

namespace plait::detail {

/// Whether kernels for activations of T add to gradients of G themselves.
template <class T, class G>
inline constexpr bool sums_in_place = std::is_same_v<G, gradient_of<T>>;

/// Calls f(sums), which adds to n numbers of gradient_of<T>: to `gradient`, or, where that is narrower, to zeros that
/// are added to it afterwards. Null for a null gradient.
template <class T, class G, compute_device Device, class F>
void with_kernel_sum(Device& device, G* gradient, std::int64_t n, F&& f) {
  using Sum = gradient_of<T>;
  if constexpr (sums_in_place<T, G>) {
    f(gradient);
  } else {
    if (gradient == nullptr) return f(static_cast<Sum*>(nullptr));
    const auto size = static_cast<std::size_t>(n);
    auto sums = make_buffer<Sum>(device, size), before = make_buffer<Sum>(device, size);
    device.zero(sums.data(), sums.bytes(), device.main_stream());
    f(sums.template data<Sum>());
    kernels::cast(device, static_cast<const G*>(gradient), before.template data<Sum>(), n);
    kernels::accumulate(device, static_cast<const Sum*>(before.template data<Sum>()), sums.template data<Sum>(), n);
    kernels::cast(device, static_cast<const Sum*>(sums.template data<Sum>()), gradient, n);
  }
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
