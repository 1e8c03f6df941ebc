// The numbers of one step that are shown: progress.hpp prints them, json_log.hpp logs them. Those that the step itself
// returns are a `step_result`, in parallel/step_result.hpp.
#pragma once

#include <cstdint>
#include <vector>

#include "plait/comm/metrics.hpp"

namespace plait {

/// The report of one optimizer step. The numbers of the training are equal on every rank; times are those of the rank
/// that reports.
struct step_record {
  std::int64_t step = 0;         ///< counted from 1: steps finished
  double loss = 0;               ///< nats per counted token of the global batch
  double grad_norm = 0;          ///< before clipping
  double lr = 0;                 ///< applied in this step
  double tokens_per_second = 0;  ///< of all ranks together
  double comm_share = 0;         ///< share of the step's time that was spent waiting in communication, 0 to 1; NaN: not
                                 ///< measured
  double mfu = 0;                ///< model flops utilisation, 0 to 1; 0: not known
  bool skipped = false;          ///< whether the gradients were not finite, so that no weight has changed
  std::vector<axis_communication> communication{};  ///< of all ranks; empty: none, or not known for this step
};

}  // namespace plait
