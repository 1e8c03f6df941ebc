// expect: a nonlinear reduction over a dim that is sharded: each rank sees only its part. Gather the dim first
// expect: on_axis<plait::cp>
// expect: on_dim<plait::seq>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<seq, shard<hidden, cp>>;
#else
using a = spec<shard<seq, cp>, hidden>;
#endif
static_assert(enforced<maximum_of<a, seq>, my_policy, a>);
