// The combinators of layers: `sequential`, `residual`, `stack`, `sum` and `redistribution`. Only the last two move
// data between specs. Next: nn/layer.hpp for the concept of a layer, examples/gpt2.hpp for a model.
#pragma once

#include "plait/layout/errors.hpp"
#include "plait/nn/combinators/residual.hpp"
#include "plait/nn/combinators/sequential.hpp"
#include "plait/nn/combinators/stack.hpp"
#include "plait/nn/combinators/sum.hpp"
