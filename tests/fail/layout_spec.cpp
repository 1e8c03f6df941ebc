#include "plait/layout/spec.hpp"

using namespace plait;

// case: axis_as_dim
// expect: inside, a dim comes first and axes follow
#ifdef PLAIT_FAIL_FIX
using right = spec<shard<hidden, tp>>;
right x;
#else
using wrong = spec<shard<tp, hidden>>;
wrong x;
#endif

// case: axis_twice
// expect: a spec uses an axis twice: one axis has one state, and shards at most one dim
#ifdef PLAIT_FAIL_FIX
using right = spec<shard<seq, cp>, shard<hidden, tp>>;
right x;
#else
using wrong = spec<shard<seq, tp>, shard<hidden, tp>>;
wrong x;
#endif

// case: axis_two_states
// expect: a spec uses an axis twice: one axis has one state, and shards at most one dim
#ifdef PLAIT_FAIL_FIX
using right = spec<shard<seq, tp>, hidden, partial<dp>>;
right x;
#else
using wrong = spec<shard<seq, tp>, hidden, partial<tp>>;
wrong x;
#endif

// case: bare_axis
// expect: a bare axis in a spec: write shard<dim, axis>, replicate<axis>, partial<axis> or invariant<axis>
#ifdef PLAIT_FAIL_FIX
using right = spec<shard<hidden, tp>>;
right x;
#else
using wrong = spec<hidden, tp>;
wrong x;
#endif

// case: dim_as_axis
// expect: a spec lists dims, shard<dim, axes...>, replicate<axes...>, partial<axes...> and invariant<axes...>; inside, a dim comes first and axes follow
#ifdef PLAIT_FAIL_FIX
using right = spec<shard<hidden, tp>, seq>;
right x;
#else
using wrong = spec<shard<hidden, seq>>;
wrong x;
#endif

// case: dim_twice
// expect: a spec names a dim twice
#ifdef PLAIT_FAIL_FIX
using right = spec<seq, shard<hidden, tp>>;
right x;
#else
using wrong = spec<hidden, shard<hidden, tp>>;
wrong x;
#endif

// case: replicate_dim
// expect: inside, a dim comes first and axes follow
#ifdef PLAIT_FAIL_FIX
using right = spec<hidden, seq, replicate<tp>>;
right x;
#else
using wrong = spec<hidden, replicate<seq>>;
wrong x;
#endif
