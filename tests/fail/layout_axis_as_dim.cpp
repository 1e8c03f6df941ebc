// expect: inside, a dim comes first and axes follow
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using right = spec<shard<hidden, tp>>;
right x;
#else
using wrong = spec<shard<tp, hidden>>;
wrong x;
#endif
