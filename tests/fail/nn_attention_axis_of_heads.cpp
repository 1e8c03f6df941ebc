// expect: an axis of context-parallel attention shards the heads too: a policy such as ring<cp> needs an axis of its own, which shards the sequence and no heads
// expect: on_axis<plait::tp>
// expect: my_strategy
// errors-at-most: 1
#include "plait/nn/attention.hpp"
#include "plait/nn/strategy.hpp"

using namespace plait;

struct my_strategy : megatron_sp {
#ifndef PLAIT_FAIL_FIX
  using attention = ring<tp>;
#endif
};
template class plait::self_attention<float, my_strategy>;
