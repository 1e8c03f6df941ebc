// The share of a rank's kv heads that its query heads use, where kv heads are replicated over some axes. Arithmetic on
// boxes, without tensors.
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
local_heads share_of_heads(const box& q, const box& k, const std::string& name);

}  // namespace plait::detail

#ifndef PLAIT_COMPILED
#include "plait/nn/attention/local_heads.ipp"  // IWYU pragma: keep
#endif
