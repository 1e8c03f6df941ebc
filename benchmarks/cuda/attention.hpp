#pragma once

#include <memory>

#include "plait/device/attention_choice.hpp"

namespace bench {

/// cuDNN's attention; null where this was built without cuDNN. Throws `plait::error` where cuDNN does not work.
std::unique_ptr<plait::attention_library> make_cudnn_attention();

}  // namespace bench
