// expect: the policy has a member `Mesh`, which means nothing: did you mean `mesh`?
// expect: up_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

// The boundary would not be checked.
struct up_policy {
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
#ifdef PLAIT_FAIL_FIX
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
#else
  using Mesh = plait::mesh<axis<dp>, axis<tp>>;
#endif
};
template class plait::linear<float, up_policy>;
