// A layer's calls on the caller's memory, for arrays of another element type with the same bits. Which types those are:
// core/same_bits.hpp.
#pragma once

#include <type_traits>
#include <utility>

#include "plait/core/same_bits.hpp"
#include "plait/tensor/microbatch.hpp"

namespace plait {

/// A base of layers: `forward` and `backward` whose first array is of a type with the bits of T are those of `Layer`,
/// with each such pointer taken as one to T. The layer has them by `using`.
template <class Layer, class T, compute_device Device>
class same_bits_calls {
 public:
  template <class Other, class... More>
    requires same_bits<std::remove_const_t<Other>, T>
  decltype(auto) forward(const microbatch<Device>& mb, Other* x, More&&... more) {
    return static_cast<Layer&>(*this).forward(mb, elements_of<T>(x), elements_of<T>(std::forward<More>(more))...);
  }
  template <class Other, class... More>
    requires same_bits<std::remove_const_t<Other>, T>
  decltype(auto) backward(const microbatch<Device>& mb, Other* x, More&&... more) {
    return static_cast<Layer&>(*this).backward(mb, elements_of<T>(x), elements_of<T>(std::forward<More>(more))...);
  }
};

}  // namespace plait
