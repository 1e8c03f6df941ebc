// expect: a policy names `input`, the spec of the layer's input: using input = spec<...>
// expect: up_policy
// expect: a policy names `weight`, the spec of the weight in use: using weight = spec<...>
// expect: table_policy
// errors-at-most: 2
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear.hpp"

using namespace plait;

// A linear without a spec of its input.
struct up_policy {
#ifdef PLAIT_FAIL_FIX
  using input = spec<shard<batch, dp>, hidden, invariant<tp>>;
#endif
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<ffn, tp>>;
  using mesh = plait::mesh<axis<dp>, axis<tp>>;
};
template class plait::linear<float, up_policy>;

// An embedding whose table is not a spec.
struct table_policy {
  using input = spec<shard<batch, dp>>;
#ifdef PLAIT_FAIL_FIX
  using weight = spec<vocab, hidden>;
#else
  static constexpr int weight = 1;
#endif
  using output = spec<shard<batch, dp>, hidden>;
};
template class plait::embedding<float, table_policy>;
