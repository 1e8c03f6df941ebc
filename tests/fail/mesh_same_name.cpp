// expect: two axes of a mesh have the same name: give each axis_tag its own
// errors-at-most: 1
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
struct other : axis_tag<"tp2"> {};
using right = mesh<axis<tp, 2>, axis<other, 2>>;
constexpr auto n = right::rank;
#else
struct other : axis_tag<"tp"> {};
using wrong = mesh<axis<tp, 2>, axis<other, 2>>;
constexpr auto n = wrong::rank;
#endif
