#pragma once

#include <vector>

#include "options.hpp"
#include "plait/comm/agreement.hpp"
#include "plait/models/llama_config.hpp"

/// The keys of a model's config.json with their values, which say what the model computes.
std::vector<plait::knob> model_knobs(const plait::llama_config& c);

/// What the ranks of several processes must have been given alike: options, the model, the data, what follows from
/// them. agreed.cpp lists what may differ.
std::vector<plait::knob> agreed_knobs(const setup& s);
