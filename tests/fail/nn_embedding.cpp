// expect: my_table
// errors-at-most: 1
#include "if_fixed.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/linear/policy.hpp"

using namespace plait;

struct table {
  using input = spec<shard<batch, dp>, shard<seq, cp>, invariant<tp>>;
  using weight = spec<shard<vocab, tp>, hidden>;
  using output = spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>;
};

// case: embedding_bias
// expect: an embedding has no bias: leave `bias` out of its policy
// Without the error, the bias would be ignored.
struct my_table : table {
#ifndef PLAIT_FAIL_FIX
  static constexpr bool bias = true;
#endif
};
template class plait::embedding<float, my_table>;

// case: overlap_of_embedding
// expect: an embedding has no product to overlap with: leave `overlap` out of its policy
// Without the error, the overlap would be ignored.
struct my_table : table {
#ifndef PLAIT_FAIL_FIX
  using overlap = plait::overlap<4>;
#endif
};
template class plait::embedding<float, my_table>;

// case: embedding_unresolved
// expect: this step would need a collective over an axis that the policy does not name: redistribute explicitly, or let the two specs agree on that axis
// expect: on_axis<plait::cp>
struct my_table : table {
  using output = if_fixed<spec<shard<batch, dp>, shard<seq, cp, tp>, hidden>,
                          spec<shard<batch, dp>, seq, hidden, invariant<cp, tp>>>;
};
template class plait::embedding<float, my_table>;
