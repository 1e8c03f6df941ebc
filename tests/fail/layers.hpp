// What most cases about layers include. The build compiles it once for each compiler, and run_case.py puts it before
// those cases: what they say of themselves is then all that is left to compile. (The first one is first so that what
// compilers print of how a header was reached is short, as it is for users.)
#include "plait/nn/layer.hpp"

#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/schedule/errors.hpp"
