// expect: overlap<chunks> counts chunks of a linear's collectives: at least 1, which is no overlap
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
template struct plait::overlap<1>;
#else
template struct plait::overlap<0>;
#endif
