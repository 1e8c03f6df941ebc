// expect: the dims are not the ones expected here, in this order
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

// No redistribution turns the original order into zigzag order: the loader of data places tokens.
using text = spec<shard<batch, dp>, shard<seq, cp>, hidden>;
#ifdef PLAIT_FAIL_FIX
using other = spec<shard<batch, dp>, seq, hidden, replicate<cp>>;
#else
using other = spec<shard<batch, dp>, shard<zseq, cp>, hidden>;
#endif
static_assert(enforced<move_of<text, other>, my_policy, text, other>);
