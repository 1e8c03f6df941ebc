// A message between two stages of a pipeline, by what it carries. Which ranks the stages are on says
// schedule/pipeline_shape.hpp; which messages a schedule needs, schedule/program.hpp; parallel/executor.hpp sends them.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/text.hpp"

namespace plait {

/// A message from one stage to the next (an activation) or to the one before (its gradient).
enum class transfer_kind : std::uint8_t { activation, gradient };

/// One message between two ranks. Stages on one rank hand over in place: that is no transfer.
struct transfer {
  transfer_kind kind = transfer_kind::activation;
  int from_stage = 0;
  int to_stage = 0;
  int microbatch = 0;

  friend constexpr bool operator==(const transfer&, const transfer&) = default;
};

/// "activation 3: stage 1 -> 2"
inline std::string describe(const transfer& t) {
  return cat({t.kind == transfer_kind::activation ? "activation " : "gradient ", t.microbatch, ": stage ", t.from_stage,
              " -> ", t.to_stage});
}

}  // namespace plait
