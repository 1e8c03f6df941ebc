// expect: `overlap` would hide nothing: by their specs, its linears gather no input and reduce no output
// expect: local_up
// errors-at-most: 1
#include "plait/nn/linear.hpp"

using namespace plait;

// A weight that every rank has: no chunk of anything is on its way while a product runs.
struct local_up {
#ifdef PLAIT_FAIL_FIX
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using weight = spec<shard<ffn, tp>, hidden>;
  using output = spec<shard<batch, dp>, seq, shard<ffn, tp>>;
#else
  using input = spec<shard<batch, dp>, shard<seq, tp>, hidden>;
  using weight = spec<ffn, hidden>;
  using output = spec<shard<batch, dp>, shard<seq, tp>, ffn>;
#endif
  using overlap = plait::overlap<4>;
};
template class plait::linear<float, local_up>;
