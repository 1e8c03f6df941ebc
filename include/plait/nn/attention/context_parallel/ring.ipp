// The definitions of ring.hpp, which includes them unless they are compiled apart (core/compiled.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plait/core/compiled.hpp"

namespace plait {

PLAIT_INLINE ring_route::ring_route(const std::vector<std::vector<token_run>>& blocks, std::size_t mine,
                                    std::int64_t window)
    : ranks_(static_cast<int>(blocks.size())), mine_(static_cast<int>(mine)), hops_(blocks.size()) {
  for (int j = 0; j < ranks_; ++j)
    for (int s = 1; s < ranks_; ++s)
      if (sees(blocks[at(j + s)], blocks[at(j)], window)) hops_[at(j)] = s;
  last_ = *std::max_element(hops_.begin(), hops_.end());
}

}  // namespace plait
