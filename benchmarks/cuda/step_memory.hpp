#pragma once

#include <cstdint>

#include "plait/models/llama_config.hpp"

namespace bench {

/// The most bytes that a training step of the model in bf16 holds at a time on one GPU, by a dry run: `tokens` are
/// those of a microbatch, in sequences of `seq`. What attention and cuBLASLt need for themselves comes on top.
std::int64_t planned_bytes(const plait::llama_config& model, std::int64_t tokens, std::int64_t seq,
                           std::int64_t microbatches);

}  // namespace bench
