#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model_run.hpp"
#include "plait/io/json.hpp"

/// Returns the bytes that one rank of a group sends, of those of all of them. A message is counted by its sender alone.
std::uint64_t per_rank(const plait::mesh_shape& shape, const std::string& label, plait::collective kind,
                       std::uint64_t wire);
/// Returns those of one step, of all collectives of a row that has so many.
std::uint64_t per_rank(const plait::mesh_shape& shape, const plait::ledger::row& row, std::uint64_t steps = 1);

/// All that the ranks have sent, and whether that is what the types say.
struct traffic {
  plait::json_object bytes;  ///< of a rank, by axis
  std::string text;
  bool as_predicted = true;
};

/// Returns that of so many steps. Collective.
traffic traffic_of(const setup& s, model_run& run, std::int64_t steps);

/// Returns the axes for which ranks have waited longest; null where that is not known.
const plait::axis_communication* most_waited(const std::vector<plait::axis_communication>& communication);
