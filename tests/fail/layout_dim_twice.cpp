// expect: a spec names a dim twice
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using right = spec<seq, shard<hidden, tp>>;
right x;
#else
using wrong = spec<hidden, shard<hidden, tp>>;
wrong x;
#endif
