#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "options.hpp"
#include "plait/comm/value_checks.hpp"
#include "plait/core/types.hpp"
#include "plait/layout/mesh.hpp"
#include "plait/schedule/parse.hpp"

// Options whose values are more than a word or a number.

/// Reads --mesh. `ranks` < 0: as many as the mesh has. Throws `plait::error` as `plait::parse_mesh`.
plait::mesh_shape parse_mesh(const options& opt, std::int64_t ranks = -1);
/// Reads --schedule. Throws `plait::error` as `plait::parse_schedule`.
plait::schedule parse_schedule(const options& opt, int ranks, int microbatches,
                               const plait::schedule_costs& costs = {});

/// Reads --data-weights, of so many --data. Throws `plait::error` for what is no list of as many numbers.
std::vector<double> parse_weights(const std::string& text, std::size_t sources);

/// Reads --deterministic. Throws `plait::error` for what is neither off nor one to three numbers.
plait::deterministic_leaves parse_deterministic(const std::string& text);
/// Of --check. Throws for anything else than what its help says.
plait::value_check parse_check(const std::string& text);
