// expect: an axis' extent is a number of ranks: at least 1, or plait::dynamic
// errors-at-most: 1
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
constexpr auto n = axis<tp, 1>::extent;
#else
constexpr auto n = axis<tp, 0>::extent;
#endif
