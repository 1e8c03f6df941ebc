#pragma once

#include <cstdint>

#include "options.hpp"

/// Reads the options of data parallelism, for so many ranks along dp and cp.
void set_parallel(setup& s, std::int64_t dp, std::int64_t cp);

/// Refuses to cut what linears send over tp where they send nothing, or into more pieces than it has tokens.
void check_tensor_overlap(const options& opt, std::int64_t cp, std::int64_t tp);
