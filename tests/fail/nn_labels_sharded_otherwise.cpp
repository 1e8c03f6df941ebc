// expect: a dim is sharded over an axis in one operand and not in the other: the local sizes differ. Gather it, or shard the other operand alike
// expect: on_axis<plait::dp>
// errors-at-most: 1
#include "plait/nn/loss.hpp"

using namespace plait;

using logits = spec<shard<batch, dp>, shard<vocab, tp>>;
#ifdef PLAIT_FAIL_FIX
using labels = spec<shard<batch, dp>, invariant<tp>>;
#else
using labels = spec<batch, invariant<dp, tp>>;
#endif
template class plait::cross_entropy_loss<float, logits, labels>;
