// The schedule of forward passes alone.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// The forward passes of `microbatches` microbatches alone, as an evaluation runs them: every stage takes them in
/// order, later stages first where two could run.
constexpr schedule forward_schedule(pipeline_shape shape, int microbatches) {
  shape.microbatches = microbatches;
  schedule plan{"forward", shape, std::vector<std::vector<action>>(static_cast<std::size_t>(shape.ranks))};
  // In each wave, stage s runs microbatch wave - s.
  for (int wave = 0; wave < microbatches + shape.stages() - 1; ++wave)
    for (int stage = std::min(wave, shape.stages() - 1); stage >= 0; --stage)
      if (const int microbatch = wave - stage; microbatch < microbatches)
        plan.order[static_cast<std::size_t>(shape.rank_of(stage))].push_back(
            forward_of(shape.chunk_of(stage), microbatch));
  return plan;
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
