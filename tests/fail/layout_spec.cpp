#include "if_fixed.hpp"
#include "plait/layout/spec.hpp"

using namespace plait;

// case: axis_as_dim
// expect: inside, a dim comes first and axes follow
spec<if_fixed<shard<hidden, tp>, shard<tp, hidden>>> x;

// case: axis_twice
// expect: a spec uses an axis twice: one axis has one state, and shards at most one dim
spec<shard<seq, if_fixed<cp, tp>>, shard<hidden, tp>> x;

// case: axis_two_states
// expect: a spec uses an axis twice: one axis has one state, and shards at most one dim
spec<shard<seq, tp>, hidden, partial<if_fixed<dp, tp>>> x;

// case: bare_axis
// expect: a bare axis in a spec: write shard<dim, axis>, replicate<axis>, partial<axis> or invariant<axis>
spec<hidden, if_fixed<replicate<tp>, tp>> x;

// case: dim_as_axis
// expect: a spec lists dims, shard<dim, axes...>, replicate<axes...>, partial<axes...> and invariant<axes...>; inside, a dim comes first and axes follow
spec<shard<hidden, if_fixed<tp, seq>>> x;

// case: dim_twice
// expect: a spec names a dim twice
spec<if_fixed<seq, hidden>, shard<hidden, tp>> x;

// case: replicate_dim
// expect: inside, a dim comes first and axes follow
spec<hidden, replicate<if_fixed<tp, seq>>> x;
