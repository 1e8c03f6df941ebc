#pragma once

/// What layers are composed with: `sequential`, `residual`, `stack`, `sum` and `redistribution`. See nn/layer.hpp for
/// what a layer is.
#include "plait/layout/errors.hpp"
#include "plait/nn/residual.hpp"
#include "plait/nn/sequential.hpp"
#include "plait/nn/stack.hpp"
#include "plait/nn/sum.hpp"
