#pragma once

#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "plait/models/llama_config.hpp"

/// Returns the names and shapes of a model's tensors. The model is built on a device that only counts.
std::vector<plait::safetensors_declaration> tensors_of(const plait::llama_config& config);
