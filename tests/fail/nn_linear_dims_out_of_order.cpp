// expect: the dims are not the ones expected here, in this order
// expect: of_operand<plait::operand::weight>
// expect: expected_dims<plait::ffn, plait::hidden>
// expect: given_dims<plait::hidden, plait::ffn>
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
#ifdef PLAIT_FAIL_FIX
  using weight = spec<shard<ffn, tp>, hidden>;
#else
  using weight = spec<hidden, shard<ffn, tp>>;
#endif
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
};
template class plait::linear<float, up_policy>;
