// The definitions of arrivals.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <cstddef>
#include <vector>

#include "plait/core/compiled.hpp"

namespace plait {

namespace detail {

PLAIT_INLINE std::vector<std::vector<std::size_t>> arrived_sends_at_run_time(
    const pipeline_shape& shape, const std::vector<std::vector<step_entry>>& programs, int rank) {
  return find_arrived_sends(shape, programs, rank);
}

}  // namespace detail

}  // namespace plait
