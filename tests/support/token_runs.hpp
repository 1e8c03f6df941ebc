#pragma once

#include <cstdint>
#include <vector>

#include "plait/tensor/sequence_order.hpp"

namespace plait::test {

using runs_of = std::vector<token_run>;

/// The runs of tokens in each rank's block.
inline std::vector<runs_of> blocks_of(const sequence_order& order, std::int64_t ranks) {
  std::vector<runs_of> blocks;
  for (std::int64_t r = 0; r < ranks; ++r) {
    const std::int64_t begin = part_begin(order.length(), ranks, r), end = part_begin(order.length(), ranks, r + 1);
    blocks.push_back(order.runs(begin, end - begin));
  }
  return blocks;
}

}  // namespace plait::test
