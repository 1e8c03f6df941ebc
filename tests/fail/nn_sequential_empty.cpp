// expect: a sequential needs at least one layer
#include "plait/nn/combinators.hpp"
#include "plait/nn/norm.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using layers = sequential<rms_norm<float, spec<shard<batch, dp>, hidden>>>;
#else
using layers = sequential<>;
#endif
using taken = layers::input;
