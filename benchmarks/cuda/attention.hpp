#pragma once

#include <memory>

#include "plait/device/cuda.hpp"

namespace bench {

/// cuDNN's attention, whose gradients are sums in one order, or in any where `deterministic` is false; null where this
/// was built without cuDNN. Throws `plait::error` where cuDNN does not work.
std::unique_ptr<plait::attention_library> make_cudnn_attention(bool deterministic = true);

}  // namespace bench
