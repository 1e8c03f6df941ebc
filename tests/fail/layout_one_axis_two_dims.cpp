// expect: one axis shards different dims of two operands: each rank would combine parts that do not belong together
// expect: on_axis<plait::tp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<seq, hidden, replicate<tp>>;
using b = spec<shard<ffn, tp>, hidden>;
#else
using a = spec<shard<seq, tp>, hidden>;
using b = spec<shard<ffn, tp>, hidden>;
#endif
static_assert(enforced<product_of<out<seq, ffn>, a, b>, my_policy, a, b>);
