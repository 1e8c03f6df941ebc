// The definitions of local_heads.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"

namespace plait::detail {

PLAIT_INLINE local_heads share_of_heads(const box& q, const box& k, const std::string& name) {
  const std::int64_t heads = q.local[2];
  const std::int64_t group = q.global[2] / k.global[2];  // query heads for each kv head
  if (q.global[2] % k.global[2] != 0 || (heads >= group ? heads % group : group % heads) != 0)
    fail(
        {name, ": heads = ", q.global[2], ", kv_heads = ", k.global[2], " and ", heads,
         " heads on each rank: heads must be a multiple of kv_heads, and the heads of a rank must be whole groups or a "
         "whole part of one group of ",
         group});
  return {q.offset[2] / group - k.offset[2], heads >= group ? heads / group : 1};
}

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
