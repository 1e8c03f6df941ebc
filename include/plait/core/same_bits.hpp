// Element types of others, such as CUDA's __nv_bfloat16, that have the bits of one of plait's: layers take pointers to
// them without a cast. Which types those are, others say: device/cuda.hpp.
#pragma once

#include <type_traits>
#include <utility>

#include "plait/version.hpp"

namespace plait {

/// Whether `Other`, a type that is not plait's, has the bits of the element type T. Specialise it for a type of your
/// own, and layers take pointers to it where they take pointers to T.
template <class Other, class T>
inline constexpr bool same_bits = false;

/// Returns a pointer to elements of T for one to a type with the same bits, const if that is const; any other argument
/// as it is.
template <class T, class Argument>
decltype(auto) elements_of(Argument&& argument) {
  using Other = std::remove_pointer_t<std::remove_reference_t<Argument>>;
  if constexpr (same_bits<std::remove_const_t<Other>, T>)
    return reinterpret_cast<std::conditional_t<std::is_const_v<Other>, const T, T>*>(argument);
  else
    return std::forward<Argument>(argument);
}

}  // namespace plait
