// expect: a strategy's attention is a policy: a type that names axes = type_list<...> and an engine
// errors-at-most: 1
#include "plait/nn/strategy.hpp"

using namespace plait;

// An axis where a policy is meant.
struct my_strategy : megatron_sp {
#ifdef PLAIT_FAIL_FIX
  using attention = ring<cp>;
#else
  using attention = cp;
#endif
};
using residual_of_mine = transformer_specs<my_strategy>::residual;
