#pragma once

#include <memory>

#include "plait/device/cuda.hpp"

namespace bench {

/// Returns cuDNN's attention; null if this was built without cuDNN. With `deterministic` its gradients are sums in a
/// fixed order. Throws `plait::error` if cuDNN does not work.
std::unique_ptr<plait::attention_library> make_cudnn_attention(bool deterministic = true);

}  // namespace bench
