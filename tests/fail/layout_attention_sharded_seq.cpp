// expect: attention needs all keys of a sequence on the rank: gather the sequence, or use a context-parallel policy
// expect: on_axis<plait::cp>
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using q = spec<seq, heads, head_dim, replicate<cp>>;
using kv = spec<seq, kv_heads, head_dim, replicate<cp>>;
#else
using q = spec<shard<seq, cp>, heads, head_dim>;
using kv = spec<shard<seq, cp>, kv_heads, head_dim>;
#endif
static_assert(enforced<attention_of<q, kv>, my_policy, q, kv>);
