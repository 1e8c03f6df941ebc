// expect: a spec names an axis that the mesh does not have
// expect: on_axis<plait::cp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;
using cluster = mesh<axis<dp>, axis<tp, 4>>;

#ifdef PLAIT_FAIL_FIX
static_assert(boundary<spec<shard<batch, dp>, seq, shard<hidden, tp>>, cluster, my_policy>);
#else
static_assert(boundary<spec<shard<batch, dp>, shard<seq, cp>, shard<hidden, tp>>, cluster, my_policy>);
#endif
