// The choices of a pipeline's step: its policy of data parallelism, and the costs that order its messages. Its schedule
// is apart from them: schedule/schedule.hpp.
#pragma once

#include "plait/parallel/placement.hpp"
#include "plait/parallel/ranks.hpp"
#include "plait/schedule/simulate.hpp"
#include "plait/schedule/step.hpp"

namespace plait {

/// How the parameters of a pipeline's stages lie over data-parallel ranks, and when they move.
struct pipeline_options {
  data_parallel parallel{};
  data_axes axes{};
  bucket_cut cut = bucket_cut::even;
  gradient_wire wire = gradient_wire::full;
  schedule_costs costs{};
};

}  // namespace plait
