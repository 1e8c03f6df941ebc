// The numbers that a training step returns.
#pragma once

#include <cstdint>

#include "plait/version.hpp"

namespace plait {

/// The numbers of one optimizer step, equal on every rank.
struct step_result {
  double loss = 0;           ///< mean over the counted tokens of the global batch; 0 where no token counts
  double gradient_norm = 0;  ///< before clipping
  std::int64_t tokens = 0;   ///< counted tokens of the global batch
  bool skipped = false;      ///< whether the gradients were not finite, so that no weight has changed
};

}  // namespace plait
