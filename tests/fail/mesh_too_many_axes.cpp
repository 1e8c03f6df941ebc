// expect: a mesh has at most plait::max_axes axes
#include "plait/layout/mesh.hpp"

using namespace plait;

struct a : axis_tag<"a"> {};
struct b : axis_tag<"b"> {};

#ifdef PLAIT_FAIL_FIX
using right = mesh<axis<a>, axis<pp>, axis<dp>, axis<cp>, axis<ep>, axis<tp>>;
constexpr auto n = right::rank;
#else
using wrong = mesh<axis<a>, axis<b>, axis<pp>, axis<dp>, axis<cp>, axis<ep>, axis<tp>>;
constexpr auto n = wrong::rank;
#endif
