// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::weight>
// expect: expected_dims<plait::heads, plait::head_dim, plait::hidden>
// expect: given_dims<plait::heads, plait::hidden, plait::head_dim>
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
#ifdef PLAIT_FAIL_FIX
  using weight = spec<shard<heads, tp>, head_dim, hidden>;
#else
  using weight = spec<shard<heads, tp>, hidden, head_dim>;
#endif
  using output = spec<shard<batch, dp>, shard<heads, tp>, head_dim>;
};
template class plait::linear<float, up_policy>;
