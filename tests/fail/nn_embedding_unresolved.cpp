// expect: this step would need a collective over an axis that the policy does not name: redistribute explicitly, or let the two specs agree on that axis
// expect: on_axis<plait::cp>
// expect: my_table
// errors-at-most: 1
#include "plait/nn/embedding.hpp"

using namespace plait;

struct my_table {
  using input = spec<shard<batch, dp>, shard<seq, cp>, invariant<tp>>;
  using weight = spec<shard<vocab, tp>, hidden>;
#ifdef PLAIT_FAIL_FIX
  using output = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
#else
  using output = spec<shard<batch, dp>, seq, hidden, invariant<cp, tp>>;
#endif
};
template class plait::embedding<float, my_table>;
