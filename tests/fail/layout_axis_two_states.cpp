// expect: a spec uses an axis twice: one axis has one state, and shards at most one dim
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using right = spec<shard<seq, tp>, hidden, partial<dp>>;
right x;
#else
using wrong = spec<shard<seq, tp>, hidden, partial<tp>>;
wrong x;
#endif
