// Every layer, the tensors between them, and in-process ranks to run them on. No optimizer and no model. Next:
// nn/layer.hpp for a layer of one's own, nn/strategy.hpp for a strategy, train.hpp for training.
#pragma once

#include "plait/comm/threads.hpp"
#include "plait/nn/activation.hpp"
#include "plait/nn/attention.hpp"
#include "plait/nn/attention/core.hpp"
#include "plait/nn/attention/cross_attention.hpp"
#include "plait/nn/combinators.hpp"
#include "plait/nn/cross_entropy.hpp"
#include "plait/nn/dropout.hpp"
#include "plait/nn/embedding.hpp"
#include "plait/nn/layer/policy.hpp"
#include "plait/nn/layer/with_saved.hpp"
#include "plait/nn/linear.hpp"
#include "plait/nn/mlp.hpp"
#include "plait/nn/norm.hpp"
#include "plait/nn/parameter/free.hpp"
#include "plait/nn/positions.hpp"
#include "plait/nn/strategies.hpp"
#include "plait/nn/strategy/parallel.hpp"
#include "plait/tensor/parts.hpp"
#include "plait/tensor/redistribute.hpp"
