#pragma once

#include <string>

#include "model_run.hpp"

/// The training of one rank, from the first step to the sampled text; rank 0 reports and writes the outputs. Returns
/// why the training could not go on, the same on all ranks; empty if it could.
std::string train(const setup& s, model_run& run);
