// Chooses between the right and the wrong form of a case, by a value or a type.
#pragma once

#include <type_traits>

#ifdef PLAIT_FAIL_FIX
inline constexpr bool fixed = true;
#else
inline constexpr bool fixed = false;
#endif

template <class Right, class Wrong>
using if_fixed = std::conditional_t<fixed, Right, Wrong>;
