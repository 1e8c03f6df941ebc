// expect: a nonlinear operation on a partial value: each rank holds only a term of a pending sum. Resolve it first
// expect: on_axis<plait::tp>
// errors-at-most: 1
#include "plait/nn/norm.hpp"
#include "plait/nn/pointwise.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using value = spec<shard<batch, dp>, hidden, invariant<tp>>;
#else
using value = spec<shard<batch, dp>, hidden, partial<tp>>;
#endif

// case: norm
using layer_of_it = plait::rms_norm<float, value>;
template class plait::rms_norm<float, value>;

// case: layer_norm
using layer_of_it = plait::layer_norm<float, value>;
template class plait::layer_norm<float, value>;

// case: dropout
using layer_of_it = plait::dropout<float, value>;
template class plait::dropout<float, value>;
