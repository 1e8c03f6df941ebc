#pragma once

#include <cstdint>

#include "options.hpp"

/// Reads --deterministic. Refuses leaves that this mesh, or the sizes of model and batch, do not divide.
void set_deterministic(setup& s, std::int64_t dp, std::int64_t cp, std::int64_t tp);
