// The definitions of expand.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"

namespace plait {

namespace detail {

PLAIT_INLINE step_schedule expand_at_run_time(const schedule& s, std::vector<step_unit> units,
                                              const data_parallel& policy, const schedule_costs& costs) {
  return expand_units(s, std::move(units), policy, costs);
}

}  // namespace detail

}  // namespace plait
