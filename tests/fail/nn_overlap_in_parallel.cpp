// expect: `overlap` would hide nothing: by their specs, its linears gather no input and reduce no output
// expect: beside
// errors-at-most: 1
#include "plait/nn/mlp.hpp"
#include "plait/nn/strategy.hpp"

using namespace plait;

// The branches share one gather and one reduction, which are outside of their linears.
struct beside : in_parallel<megatron_sp> {
#ifndef PLAIT_FAIL_FIX
  using overlap = plait::overlap<4>;
#endif
};
template class plait::swiglu_mlp<float, beside>;
