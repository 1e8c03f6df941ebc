// expect: the output of a layer does not lie as the next one takes it: let their policies agree
// expect: expected_dims<plait::batch, plait::zseq, plait::hidden>
// errors-at-most: 1
#include "plait/nn/strategy.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/norm.hpp"

using namespace plait;

// The tokens of the one lie in zigzag order, the other takes them in original order.
using zig = context_parallel<megatron_sp, ring<cp>, zigzag>;
#ifdef PLAIT_FAIL_FIX
using text = zig;
#else
using text = megatron_sp;
#endif
static_assert(sizeof(sequential<rms_norm<float, text::residual>, self_attention<float, zig>>) > 0);
