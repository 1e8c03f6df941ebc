#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "options.hpp"
#include "plait/core/recompute.hpp"

/// What --recompute says: modes, or a budget of bytes that a rank's layers may keep.
struct recompute_request {
  plait::layer_recompute modes;
  std::optional<std::int64_t> every, budget;
};

/// Reads none, selective, full, every:K or budget:SIZE, as in budget:512M. Throws for others.
recompute_request parse_recompute(const std::string& text);

/// The modes of all layers: those that were asked for, or the cheapest that fit the budget on every rank of the
/// pipeline, by dry runs. Throws where a budget cannot be met, with the least that can.
plait::layer_recompute recompute_of(const setup& s);
