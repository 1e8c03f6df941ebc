#pragma once

#include <cstdint>

#include "plait/models/llama_config.hpp"

namespace bench {

/// Returns the peak bytes of a training step of the model in bf16 on one GPU, from a dry run. `tokens` are those of a
/// microbatch, in sequences of `seq`. Scratch memory of attention and cuBLASLt is not included.
std::int64_t planned_bytes(const plait::llama_config& model, std::int64_t tokens, std::int64_t seq,
                           std::int64_t microbatches);

}  // namespace bench
