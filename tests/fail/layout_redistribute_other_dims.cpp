// expect: the dims are not the ones expected here, in this order
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<shard<seq, tp>, hidden>;
using b = spec<seq, shard<hidden, tp>>;
#else
using a = spec<shard<seq, tp>, hidden>;
using b = spec<hidden, shard<seq, tp>>;
#endif
static_assert(enforced<move_of<a, b>, my_policy, a, b>);
