// expect: an invariant value mixes with nothing but invariant values: its gradient would miss the other ranks' terms. Use it as replicate<axis> (no communication now, one reduction of its gradient)
// expect: on_axis<plait::tp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<seq, hidden, replicate<tp>>;
using b = spec<shard<ffn, tp>, hidden>;
#else
using a = spec<seq, hidden, invariant<tp>>;
using b = spec<shard<ffn, tp>, hidden>;
#endif
static_assert(enforced<product_of<out<seq, ffn>, a, b>, my_policy, a, b>);
