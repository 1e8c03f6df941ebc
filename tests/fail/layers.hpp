// Includes of most cases about layers. The build compiles this header once for each compiler, and run_case.py puts it
// before those cases, so a case compiles only its own lines. (layer.hpp is first so that the chain of includes that
// compilers print is short, as it is for users.)
#include "plait/nn/layer.hpp"

#include "plait/models/llama.hpp"
#include "plait/nn/strategy.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/parallel/optim/adamw.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/schedule/errors.hpp"
