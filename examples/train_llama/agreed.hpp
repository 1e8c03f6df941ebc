#pragma once

#include <optional>

#include "options.hpp"
#include "plait/comm/agreement.hpp"
#include "plait/core/vector.hpp"
#include "plait/models/llama_config.hpp"

/// The keys of a model's config.json with their values, which say what the model computes.
plait::dynamic_vector<plait::setting> model_settings(const plait::llama_config& c);
/// The model that `model_settings` tells so; nothing where a key is missing or has no such value.
std::optional<plait::llama_config> model_of(const plait::dynamic_vector<plait::setting>& settings);

/// What the ranks of several processes must have been given alike: options, the model, the data, what follows from
/// them. agreed.cpp lists what may differ.
plait::dynamic_vector<plait::setting> agreed_settings(const setup& s);
