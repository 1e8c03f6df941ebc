// expect: a dim has fewer elements than there are ranks that shard it
// expect: on_axis<plait::tp>
// expect: on_dim<plait::heads>
// errors-at-most: 1
#include "layout_cases.hpp"

using namespace cases;

#ifdef PLAIT_FAIL_FIX
inline constexpr std::int64_t head_count = 8;
#else
inline constexpr std::int64_t head_count = 3;
#endif
using a = spec<shard<heads, tp>>;
static_assert(enforced<parts_of<a, mesh<axis<tp, 4>>, heads, head_count>, my_policy, a>);
