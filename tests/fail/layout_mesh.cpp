#include "if_fixed.hpp"
#include "plait/layout/spec.hpp"

using namespace plait;

// case: axis_twice
// expect: a mesh names each axis once
// errors-at-most: 1
constexpr auto n = mesh<axis<tp, 2>, axis<dp>, axis<if_fixed<cp, tp>, 4>>::rank;

// case: extent_zero
// expect: an axis' extent is a number of ranks: at least 1, or plait::dynamic
// errors-at-most: 1
constexpr auto n = axis<tp, fixed ? 1 : 0>::extent;

// case: name_too_long
// expect-gcc: from 'const char [24]' to 'plait::name'
// expect-clang: no viable conversion from 'const char[24]'
#ifdef PLAIT_FAIL_FIX
struct right : axis_tag<"an_axis_of_sixte"> {};
#else
struct wrong : axis_tag<"an_axis_of_23_character"> {};
#endif

// case: same_name
// expect: two axes of a mesh have the same name: give each axis_tag its own
// errors-at-most: 1
struct other : if_fixed<axis_tag<"tp2">, axis_tag<"tp">> {};
constexpr auto n = mesh<axis<tp, 2>, axis<other, 2>>::rank;

// case: too_many_axes
// expect: a mesh has at most plait::max_axes axes
struct a : axis_tag<"a"> {};
struct b : axis_tag<"b"> {};

#ifdef PLAIT_FAIL_FIX
constexpr auto n = mesh<axis<a>, axis<pp>, axis<dp>, axis<cp>, axis<ep>, axis<tp>>::rank;
#else
constexpr auto n = mesh<axis<a>, axis<b>, axis<pp>, axis<dp>, axis<cp>, axis<ep>, axis<tp>>::rank;
#endif
