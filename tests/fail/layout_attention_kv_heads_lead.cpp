// expect: the axes of kv_heads must be the leading axes of heads: shard<heads, a, b> goes with shard<kv_heads, a, b> or shard<kv_heads, a>
// expect: on_axis<plait::tp>
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using q = spec<seq, shard<heads, tp, cp>, head_dim>;
using kv = spec<seq, shard<kv_heads, tp>, head_dim, replicate<cp>>;
#else
using q = spec<seq, shard<heads, cp, tp>, head_dim>;
using kv = spec<seq, shard<kv_heads, tp>, head_dim, replicate<cp>>;
#endif
static_assert(enforced<attention_of<q, kv>, my_policy, q, kv>);
