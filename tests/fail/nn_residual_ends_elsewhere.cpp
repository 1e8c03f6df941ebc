// expect: a residual branch must end as it began: norm, layer and the residual stream need one spec
// expect: on_axis<plait::tp>, plait::on_dim<plait::seq>, plait::states<plait::state::invariant, plait::state::varying>
// expect: output_of_layer<1, plait::sequential<
// expect: input_of_layer<0, plait::rms_norm<float
// errors-at-most: 1
#include "plait/nn/combinators.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/norm.hpp"

using namespace plait;

using stream = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
struct proj_policy {
  using input = stream;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
};
struct back_policy {
  using input = proj_policy::output;
  using weight = spec<hidden, shard<ffn, tp>>;
#ifdef PLAIT_FAIL_FIX
  using output = stream;
#else
  using output = spec<shard<batch, dp>, seq, hidden, invariant<tp>>;
#endif
};
using inner = sequential<linear<float, proj_policy>, linear<float, back_policy>>;
using branch = residual<rms_norm<float, stream>, inner>;
using end = branch::saved;
