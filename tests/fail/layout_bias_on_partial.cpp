// expect: a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending sum first, then add
// expect: on_axis<plait::tp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<shard<seq, tp>, hidden>;
using b = spec<hidden, replicate<tp>>;
#else
using a = spec<seq, hidden, partial<tp>>;
using b = spec<hidden, replicate<tp>>;
#endif
static_assert(enforced<combination_of<combine::sum, a, b>, my_policy, a, b>);
