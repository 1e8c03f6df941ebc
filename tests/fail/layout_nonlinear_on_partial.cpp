// expect: a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first
// expect: on_axis<plait::tp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<seq, shard<ffn, tp>>;
#else
using a = spec<seq, ffn, partial<tp>>;
#endif
static_assert(enforced<nonlinear_of<a>, my_policy, a>);
