#pragma once

#include <cstdint>

#include "options.hpp"

/// Reads the model's shape, and looks at what --init-from names.
void open_model(setup& s);

/// Opens --data, for so many data ranks.
void open_data(setup& s);
