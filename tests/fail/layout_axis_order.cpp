// with-nvcc: yes
// expect: a dim is sharded over the same axes in a different order in two operands: the local parts are different rows
// expect: on_dim<plait::seq>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<shard<seq, cp, tp>, hidden>;
using b = spec<shard<seq, cp, tp>, hidden>;
#else
using a = spec<shard<seq, cp, tp>, hidden>;
using b = spec<shard<seq, tp, cp>, hidden>;
#endif
static_assert(enforced<combination_of<combine::sum, a, b>, my_policy, a, b>);
