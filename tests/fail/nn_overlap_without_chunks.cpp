// expect: overlap<chunks> counts chunks of a linear's collectives: at least 1, which is no overlap
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
constexpr std::int64_t chunks = overlap<1>::chunks;
#else
constexpr std::int64_t chunks = overlap<0>::chunks;
#endif
static_assert(chunks != 7);
