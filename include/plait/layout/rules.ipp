// The definitions of rules.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include "plait/core/compiled.hpp"

namespace plait {

namespace detail {

PLAIT_INLINE verdict check_boundary_at_run_time(const layout& a, const mesh_shape& mesh) {
  return find_boundary(a, mesh);
}

}  // namespace detail

}  // namespace plait
