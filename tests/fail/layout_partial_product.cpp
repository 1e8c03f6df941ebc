// expect: the product of two partial values is not partial: the sum of products is not the product of sums. Resolve one of the pending sums first
// expect: on_axis<plait::tp>
// expect: my_policy
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
using a = spec<seq, hidden, partial<tp>>;
using b = spec<seq, hidden, replicate<tp>>;
#else
using a = spec<seq, hidden, partial<tp>>;
using b = spec<seq, hidden, partial<tp>>;
#endif
static_assert(enforced<combination_of<combine::product, a, b>, my_policy, a, b>);
