#pragma once

#include <cstdint>

#include "plait/version.hpp"

namespace plait {

/// What a layer keeps for its backward pass. `none`: everything it will need. `selective`: not what is cheap to make
/// again (normalised values, activations, gathered inputs). `full`: its input only; the forward pass runs again.
enum class recompute : std::uint8_t { none, selective, full };

constexpr const char* name_of(recompute policy) {
  return policy == recompute::none ? "none" : policy == recompute::selective ? "selective" : "full";
}

}  // namespace plait
