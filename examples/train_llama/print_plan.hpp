#pragma once

#include "plan.hpp"

/// Prints what --dry-run says: layouts, collectives, memory, and what of saved states fits.
void print_plan(const setup& s, const run_plan& plan);
