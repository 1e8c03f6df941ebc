// The share of a rank's kv heads that its query heads use, where kv heads are replicated over some axes. Arithmetic on
// boxes, without tensors. Next: nn/attention.hpp and nn/attention/core.hpp, which ask for it.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/box.hpp"
#include "plait/core/error.hpp"

namespace plait::detail {

/// Which of a rank's kv heads its query heads need.
struct local_heads {
  std::int64_t first = 0;  ///< of the local kv heads
  std::int64_t used = 0;
};

/// `q` and `k` are this rank's parts [batch, seq, heads, head_dim]. Where kv heads are replicated over further axes,
/// the queries here need only some of them. Throws where a rank's heads are neither whole groups nor a whole part of
/// one.
inline local_heads share_of_heads(const box& q, const box& k, const std::string& name) {
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
