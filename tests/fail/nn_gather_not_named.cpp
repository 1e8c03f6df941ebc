// expect: this step would need a collective over an axis that the policy does not name: redistribute explicitly, or let the two specs agree on that axis
// expect: on_axis<plait::cp>
// expect: on_dim<plait::seq>
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

// The weight is sharded over tp only: that the output has the whole sequence would be a hidden all-gather over cp.
struct up_policy {
  using input = spec<shard<seq, cp, tp>, hidden>;
  using weight = spec<shard<ffn, tp>, hidden>;
#ifdef PLAIT_FAIL_FIX
  using output = spec<shard<seq, cp>, shard<ffn, tp>>;
#else
  using output = spec<seq, shard<ffn, tp>, invariant<cp>>;
#endif
};
template class plait::linear<float, up_policy>;
