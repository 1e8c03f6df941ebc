// expect: a scalar has a spec without dims: spec<partial<dp>>
// errors-at-most: 2
#include "plait/testing/program_record.hpp"

using namespace plait;

#ifdef PLAIT_FAIL_FIX
using loss = spec<partial<dp>>;
#else
using loss = spec<batch, partial<dp>>;
#endif
void record(testing::program_record<cpu>& run) { run.add_scalar<loss>("loss", 1.0); }
