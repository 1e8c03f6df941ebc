// expect: a dim is sharded over an axis in one operand and not in the other: the local sizes differ. Gather it, or shard the other operand alike
// expect: on_axis<plait::tp>
// expect: on_dim<plait::hidden>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<seq, shard<hidden, tp>>;
using b = spec<ffn, shard<hidden, tp>>;
#else
using a = spec<seq, shard<hidden, tp>>;
using b = spec<ffn, hidden, replicate<tp>>;
#endif
static_assert(enforced<product_of<out<seq, ffn>, a, b>, my_policy, a, b>);
