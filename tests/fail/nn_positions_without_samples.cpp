// expect: learned positions take [samples, tokens, features]
#include "plait/nn/embedding.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using value = spec<shard<batch, dp>, seq, hidden>;
#else
using value = spec<shard<batch, dp>, hidden>;
#endif
using taken = plait::learned_positions<float, value>::input;
