// with-nvcc: yes
// expect: a boundary spec must mention every axis of its mesh: shard a dim over it, or write replicate<axis>, partial<axis> or invariant<axis>
// expect: on_axis<plait::dp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;
using cluster = mesh<axis<dp>, axis<tp, 4>>;

#ifdef PLAIT_FAIL_FIX
static_assert(boundary<spec<shard<batch, dp>, shard<hidden, tp>>, cluster, my_policy>);
#else
static_assert(boundary<spec<batch, shard<hidden, tp>>, cluster, my_policy>);
#endif
