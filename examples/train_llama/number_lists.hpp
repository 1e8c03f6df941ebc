#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "plait/comm/value_checks.hpp"
#include "plait/core/numerics.hpp"

// Options whose values are lists of numbers.

/// Reads --data-weights, of so many --data. Throws `plait::error` for what is no list of as many numbers.
std::vector<double> parse_weights(const std::string& text, std::size_t sources);

/// Reads --deterministic. Throws `plait::error` for what is neither off nor one to three numbers.
plait::numerics parse_deterministic(const std::string& text);
/// Of --check. Throws for anything else than what its help says.
plait::value_check parse_check(const std::string& text);
