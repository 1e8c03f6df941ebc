// From a schedule and the units of one rank to its step. The stages of other ranks, of which a rank knows no
// parameters, stand as one unit each.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "plait/core/macros_off.hpp"
#include "plait/data_parallel/units.hpp"
#include "plait/pipeline/options.hpp"
#include "plait/schedule/step/expand.hpp"

namespace plait::detail {

/// `local` becomes the number that each unit of the step has among `units`; -1 for those of other ranks.
template <class Precision, compute_device Device>
step_schedule step_of_units(const schedule& plan, int rank, const parameter_units<Precision, Device>& units,
                            const pipeline_options& options, std::vector<int>& local) {
  const pipeline_shape& shape = plan.shape;
  const int last = shape.stages() - 1;
  std::vector<step_unit> all;
  std::vector<int> place(static_cast<std::size_t>(units.size()));  // of this rank's units, in the step
  local.clear();
  for (int stage = 0; stage <= last; ++stage) {
    if (shape.rank_of(stage) != rank) {
      all.emplace_back().stage = stage;
      local.push_back(-1);
      continue;
    }
    for (int i = 0; i < units.size(); ++i) {
      if (units.described(i).stage != stage) continue;
      place[static_cast<std::size_t>(i)] = static_cast<int>(all.size());
      all.push_back(units.described(i));
      local.push_back(i);
    }
  }
  for (int i = 0; i < units.size(); ++i) {
    step_unit& u = all[static_cast<std::size_t>(place[static_cast<std::size_t>(i)])];
    if (u.uses >= 0) u.uses = place[static_cast<std::size_t>(u.uses)];
    if (!units.tied(i) || shape.rank_of(0) == shape.rank_of(last)) continue;
    u.tied_to = u.stage == 0 ? static_cast<int>(all.size()) - 1 : 0;
    step_unit& twin = all[static_cast<std::size_t>(u.tied_to)];
    twin.tied_to = place[static_cast<std::size_t>(i)];
    twin.parameters = u.parameters;
    twin.trainable = u.trainable;
  }
  data_parallel policy = options.parallel;
  if (policy.hybrid && !units.hybrid())
    fail(
        "data parallelism: hybrid = 1, but no ranks hold the same pieces; legal is 0, and data_axes::replicate makes a "
        "hybrid");
  policy.hybrid = units.hybrid();
  return expand(plan, std::move(all), policy, options.costs);
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
