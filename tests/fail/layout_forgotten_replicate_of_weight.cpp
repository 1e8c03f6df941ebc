// expect: an invariant value mixes with nothing but invariant values: its gradient would miss the other ranks' terms. Use it as replicate<axis> (no communication now, one reduction of its gradient)
// expect: on_axis<plait::dp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<shard<batch, dp>, hidden>;
using b = spec<hidden, replicate<dp>>;
#else
using a = spec<shard<batch, dp>, hidden>;
using b = spec<hidden>;
#endif
static_assert(enforced<combination_of<combine::product, a, b>, my_policy, a, b>);
