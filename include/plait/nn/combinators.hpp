#pragma once

/// The combinators of layers: `sequential`, `residual`, `stack`, `sum` and `redistribution`. See nn/layer.hpp for
/// what a layer is.
#include "plait/layout/errors.hpp"
#include "plait/nn/combinators/residual.hpp"
#include "plait/nn/combinators/sequential.hpp"
#include "plait/nn/combinators/stack.hpp"
#include "plait/nn/combinators/sum.hpp"
