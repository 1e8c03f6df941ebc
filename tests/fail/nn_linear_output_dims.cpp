// expect: the dims are not the ones expected here, in this order: 'given_dims' of this message came where 'expected_dims' of it belong
// expect: of_operand<plait::operand::output>
// expect: expected_dims<plait::batch, plait::seq, plait::ffn>
// expect: given_dims<plait::seq, plait::batch, plait::ffn>
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

struct up_policy {
  using input = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
#ifdef PLAIT_FAIL_FIX
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
#else
  using output = spec<seq, shard<batch, dp>, shard<ffn, tp>>;
#endif
};
template class plait::linear<float, up_policy>;
