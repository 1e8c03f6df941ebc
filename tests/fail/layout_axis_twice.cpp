// expect: a spec uses an axis twice: one axis has one state, and shards at most one dim
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using right = spec<shard<seq, cp>, shard<hidden, tp>>;
right x;
#else
using wrong = spec<shard<seq, tp>, shard<hidden, tp>>;
wrong x;
#endif
