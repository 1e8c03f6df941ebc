// expect: a product of a partial and a sharded value mixes terms of one rank with the shard of another: resolve the pending sum first
// expect: on_axis<plait::tp>
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<seq, hidden, replicate<tp>>;
using b = spec<shard<ffn, tp>, hidden>;
#else
using a = spec<seq, hidden, partial<tp>>;
using b = spec<shard<ffn, tp>, hidden>;
#endif
static_assert(enforced<product_of<out<seq, ffn>, a, b>, my_policy, a, b>);
