// expect: a gradient with the wrong spec: the gradient of a value has the dual spec (replicate and partial change places)
// expect: on_axis<plait::tp>
// expect: down_policy
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

struct down_policy {
  using input = spec<shard<batch, dp>, shard<ffn, tp>>;
  using weight = spec<hidden, shard<ffn, tp>>;
  using output = spec<shard<batch, dp>, hidden, invariant<tp>>;
};
using down = linear<float, down_policy>;
#ifdef PLAIT_FAIL_FIX
using gradient = dual_t<down::output>;
#else
using gradient = spec<shard<batch, dp>, hidden, partial<tp>>;  // the gradient of a replicated output
#endif
void backward(context<cpu>& ctx, down& layer, const tensor<float, down::input>& x, down::saved& kept, const tensor<float, gradient>& dy) {
  layer.backward(ctx, x, kept, dy);
}
