// expect: a spec lists dims, shard<dim, axes...>, replicate<axes...>, partial<axes...> and invariant<axes...>; inside, a dim comes first and axes follow
#include "plait/layout/spec.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using right = spec<shard<hidden, tp>, seq>;
right x;
#else
using wrong = spec<shard<hidden, seq>>;
wrong x;
#endif
