// expect: a sum of a partial value and one that is not partial would count the latter once per rank: resolve the pending sum first, then add
// expect: on_axis<plait::dp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<shard<seq, tp>, hidden, partial<dp>>;
using b = spec<shard<seq, tp>, hidden, partial<dp>>;
#else
using a = spec<shard<seq, tp>, hidden, partial<dp>>;
using b = spec<shard<seq, tp>, hidden, invariant<dp>>;
#endif
static_assert(enforced<combination_of<combine::sum, a, b>, my_policy, a, b>);
