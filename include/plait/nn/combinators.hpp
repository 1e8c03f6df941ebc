// The combinators of layers: `sequential`, `residual`, `stack`, `sum` and `redistribution`. Only the last two move data
// between specs.
#pragma once

#include "plait/layout/errors.hpp"
#include "plait/nn/combinators/residual.hpp"
#include "plait/nn/combinators/sequential.hpp"
#include "plait/nn/combinators/stack.hpp"
#include "plait/nn/combinators/sum.hpp"
