// expect: attention needs whole heads on the rank: the dim that its scores sum over is sharded. Shard the heads instead
// expect: on_axis<plait::tp>
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using q = spec<seq, shard<heads, tp>, head_dim>;
using kv = spec<seq, shard<kv_heads, tp>, head_dim>;
#else
using q = spec<seq, heads, shard<head_dim, tp>>;
using kv = spec<seq, kv_heads, shard<head_dim, tp>>;
#endif
static_assert(enforced<attention_of<q, kv>, my_policy, q, kv>);
