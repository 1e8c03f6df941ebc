// expect: inside, a dim comes first and axes follow
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using right = spec<hidden, seq, replicate<tp>>;
right x;
#else
using wrong = spec<hidden, replicate<seq>>;
wrong x;
#endif
