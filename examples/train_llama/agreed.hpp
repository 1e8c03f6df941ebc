#pragma once

#include <vector>

#include "options.hpp"
#include "plait/comm/agreement.hpp"

/// What the ranks of several processes must have been given alike: options, the model, the data, what follows from
/// them. agreed.cpp lists what may differ.
std::vector<plait::knob> agreed_knobs(const setup& s);
