#pragma once

#include <functional>

#include "options.hpp"

/// Tells whether the command line has an option, whatever its value.
using given_option = std::function<bool(const char* option)>;

/// Refuses what is illegal of a command line whatever files and ranks there are: unknown words, numbers out of range,
/// and options that go with others alone. Throws `plait::error` whose text names the option and what is legal.
void check_options(const options& opt, const given_option& given);
