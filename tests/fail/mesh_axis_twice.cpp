// expect: a mesh names each axis once
// errors-at-most: 1
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using right = mesh<axis<tp, 2>, axis<dp>>;
constexpr auto n = right::rank;
#else
using wrong = mesh<axis<tp, 2>, axis<dp>, axis<tp, 4>>;
constexpr auto n = wrong::rank;
#endif
