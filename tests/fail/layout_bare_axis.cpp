// expect: a bare axis in a spec: write shard<dim, axis>, replicate<axis>, partial<axis> or invariant<axis>
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using right = spec<shard<hidden, tp>>;
right x;
#else
using wrong = spec<hidden, tp>;
wrong x;
#endif
